"""Costs of compiled programs, from their jaxprs and HLO; options and cache of the compiler."""
