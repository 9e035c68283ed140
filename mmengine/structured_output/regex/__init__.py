"""Regular expressions as trees and as states; grammars are made of the same trees."""
