"""Mutation testing: does a test fail where a line of the library is changed?"""
