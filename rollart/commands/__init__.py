"""What the commands do, by group; `words.py` says what may be typed. Each imports what it needs when it runs."""
