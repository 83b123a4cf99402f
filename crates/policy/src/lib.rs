//! Decisions: placement, prefetch, eviction order; no I/O, no clock, no threads
