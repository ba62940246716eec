"""`LLM`: the front door. Loads a model, and generates: prompts at once, a chat, a stream."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from . import hub, runner, text, weights
from .config import EngineConfig, ModelConfig
from .engine import LLMEngine
from .errors import RequestError
from .model import Transformer
from .request import Delta, Prompt, RequestOutput, SamplingParams


class LLM(LLMEngine):
    """A model, ready to generate.

    model: a known name ("smollm2-135m"), a folder in Hugging Face layout, a .gguf file, or a hub id.
    device: "auto" is CUDA if there is one, else CPU. dtype: "auto" is bfloat16 on CUDA and float32 on CPU.
    The other arguments are those of `EngineConfig`. An engine belongs to one thread.
    """

    def __init__(
        self, model: str | Path = "smollm2-135m", *, device: str = "auto", dtype: str = "auto", **engine: Any
    ) -> None:
        config = EngineConfig(**engine)  # a wrong argument is refused before anything is loaded
        device = runner.pick_device(device)
        kind = runner.pick_dtype(dtype, device)
        checkpoint = weights.open_checkpoint(hub.resolve(model))
        tokenizer = checkpoint.tokenizer()
        size = sum(math.prod(shape) for shape in weights.parameter_shapes(checkpoint.config).values()) * kind.itemsize
        with runner.fits("the model's weights", size, device):
            state = checkpoint.state_dict(kind, device)
            pack = not runner.use_kernels(config, state["embed.weight"])
            network = Transformer.from_state(checkpoint.config, state, pack)
        super().__init__(checkpoint.config, network, tokenizer, config)

    @classmethod
    def from_parts(
        cls, config: ModelConfig, model: Transformer, tokenizer: text.Tokenizer | None, **engine: Any
    ) -> LLM:
        """An engine around a model that is in memory already. Without a tokenizer, prompts are token ids."""
        llm = cls.__new__(cls)
        LLMEngine.__init__(llm, config, model, tokenizer, EngineConfig(**engine))
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; one output for each prompt, in order.

        prompts: text or token ids, or a list of them. params: one for all, or one for each prompt.
        progress: show a bar; None shows it for several prompts on a terminal.
        A prompt that cannot be served gets an output whose `error` says why; the others go on. If it is the only one,
        that error is raised.
        """
        prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # numpy and torch
        if not isinstance(prompts, (str, bytes, list, tuple)):
            raise RequestError(f"prompts must be text, token ids or a list of them, got {type(prompts).__name__}.")
        single = isinstance(prompts, (str, bytes)) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        batch = cast(list[Prompt], [prompts] if single else list(prompts))
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise RequestError(f"there are {len(batch)} prompts, but {len(each)} sampling parameters.")
        outputs: dict[int, RequestOutput] = {}
        pending: dict[str, int] = {}
        show = progress if progress is not None else len(batch) > 1 and sys.stderr.isatty()
        try:
            for i, (prompt, one) in enumerate(zip(batch, each, strict=True)):
                try:
                    pending[self.add_request(prompt, one)] = i
                except RequestError as error:
                    if single:
                        raise
                    outputs[i] = RequestOutput.refused(prompt, str(error))
            with tqdm(total=len(pending), unit="prompt", disable=not show) as bar:
                while pending:
                    ended = {request.id: None for request, delta in self.step() if delta.finish_reason}
                    for request_id in ended:
                        if request_id in pending and self.is_done(request_id):
                            outputs[pending.pop(request_id)] = RequestOutput.of(self.requests.pop(request_id))
                            bar.update()
        finally:
            for request_id in pending:
                self.abort(request_id)
        if single and outputs[0].error:
            raise RequestError(outputs[0].error)
        return [outputs[i] for i in range(len(batch))]

    def chat(
        self, messages: Sequence[Any], params: SamplingParams | None = None, *, progress: bool | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}), or each of a list of conversations.

        As with `generate`, one of several that cannot be served gets an output with an `error`.
        """
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer, so it cannot render a chat.")
        many = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
        if not many:
            return self.generate(self.tokenizer.encode_chat(messages), params, progress=progress)
        prompts: list[Prompt] = []
        refused: dict[int, RequestOutput] = {}
        for i, one in enumerate(messages):
            try:
                prompts.append(self.tokenizer.encode_chat(one))
            except RequestError as error:
                refused[i] = RequestOutput.refused(None, str(error))
        answers = iter(self.generate(prompts, params, progress=progress))
        return [refused[i] if i in refused else next(answers) for i in range(len(messages))]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, timeout: float | None = None
    ) -> Iterator[Delta]:
        """Yield text as it is generated. Leaving the loop early aborts the request."""
        request_id = self.add_request(prompt, params or SamplingParams(), timeout=timeout)
        deltas = self._listeners[request_id] = deque()
        try:
            while not self.is_done(request_id) or deltas:
                while deltas:
                    yield deltas.popleft()
                if not self.is_done(request_id):
                    self.step()
            if error := next((r.error for r in self.requests.get(request_id, []) if r.error), None):
                raise RequestError(error)
        finally:
            del self._listeners[request_id]
            self.abort(request_id)
