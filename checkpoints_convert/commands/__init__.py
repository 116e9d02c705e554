"""Sub-commands of ``jaxspec-convert``, one module each: ``add_parser(commands)`` registers it."""
