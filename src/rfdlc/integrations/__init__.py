"""How decisions reach people: the report, and whatever else is built on the rooms below."""
