//! A whole cluster, simulated: managers, nodes, donors, and the spaces of their consumers, from one
//! seed.
//!
//! All of it is in `tests/simulation`. It is a crate of its own because nothing else may know both
//! what borrows pages and what manages nodes.
