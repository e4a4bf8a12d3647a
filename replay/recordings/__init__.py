"""What is done with exported files.

``recording_stream`` brings a run from its server into a file.
``recording`` is a file as its users open it, and finds what of it is damaged. ``recording_differences`` compares two.
"""
