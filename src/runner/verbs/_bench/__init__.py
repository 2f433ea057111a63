"""The work of `bench`: candidates, measurements in turns, and what to make of them."""
