"""Protocol files, each with the code that ``make proto`` generates from it."""
