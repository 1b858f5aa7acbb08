"""How an update is encoded: whole, in 16 bits, in blocks of 8 or 4 bits, its largest values."""
