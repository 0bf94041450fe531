//! Fill, copy and cast between element types, with run-time dispatch to the widest instruction set.
