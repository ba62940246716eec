# %% [markdown]
# # 90 Toy
# A lesson of two cells.

# %%
from minillm.course.stages.s90_toy import engine

from minillm.course import compare, predict, quiz, show_source

predict("90.pages", None, "pages")
show_source(engine.pages_needed)

# %%
compare("90.pages", engine.pages_needed(9, 4), "pages")

# %%
quiz("Two?", ["yes", "no"], 0, ["1 + 1.", "Count again."])
