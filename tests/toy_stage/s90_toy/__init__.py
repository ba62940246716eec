"""A toy stage that tests the course framework. It is not part of the course."""

TITLE = "Toy"
ABILITY = "see how the framework behaves"
MINUTES = 1
