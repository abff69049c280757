"""What a client's request asks of the Router."""

import dataclasses


def asked_of(wanted):
    """What differs from what is asked where nothing is said."""
    return {
        field.name: getattr(wanted, field.name)
        for field in dataclasses.fields(wanted)
        if getattr(wanted, field.name) != field.default
    }
