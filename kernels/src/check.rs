//! The happens-before checker: proves from the null logs of all ranks that every read is ordered after its write, that no
//! two conflicting accesses are concurrent (vector clocks), and rule E8.
