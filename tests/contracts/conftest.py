# A plugin, imported by name only: importing it registers its norms.
collect_ignore = ["planted_norms.py"]
