"""Speculative heads on a target model: Medusa, EAGLE-1 and EAGLE-3."""
