"""What `rollart bench` measures, one file each. A claim of speed is a ratio from one of these."""
