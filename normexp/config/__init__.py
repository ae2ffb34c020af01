"""Configuration of a cell: its schema, its composition, the rules across its fields."""
