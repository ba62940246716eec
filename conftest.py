"""For every test run, notebooks included: the reader's own progress is neither used nor changed."""

import atexit
import os
import shutil
import tempfile

_folder = tempfile.mkdtemp(prefix="minillm-test-")
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
os.environ["MINILLM_PROGRESS"] = os.path.join(_folder, "progress.json")
os.environ.setdefault("OMP_NUM_THREADS", "1")
