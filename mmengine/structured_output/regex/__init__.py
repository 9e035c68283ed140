"""Parses regular expressions to syntax trees and automata. Grammar parsers use the same trees."""
