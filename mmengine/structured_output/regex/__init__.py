"""Regular expressions as syntax trees and automata; grammars use the same trees."""
