"""The rules that each logged decision must satisfy, and checks of observations."""
