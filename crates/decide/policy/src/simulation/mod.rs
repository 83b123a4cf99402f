//! A cluster without hosts: the paper's evaluation, again, on the code that decides.
//!
//! Models nodes, their consumers' demand for memory, their disks and the messages between nodes and
//! manager, in steps of a tenth of a second. The *decisions* are made by [`crate::cluster`], as in
//! a daemon. [`cluster::membership`](crate::cluster::membership) and
//! [`cluster::member`](crate::cluster::member) decide which nodes take part and own what.
//! [`cluster::targets`](crate::cluster::targets) and [`cluster::grants`](crate::cluster::grants)
//! limit what each may hold. The same scenario, policy and seed give the same outcome on every
//! machine.
//!
//! The parts of the model say where it is coarse: [`machine`] for consumers and disks, [`scenario`]
//! for the programs, [`demand`] for recorded demand. The times are the model's. They compare
//! policies with each other under equal conditions, and are no forecast of a real cluster's.

mod cluster;
pub mod demand;
pub mod machine;
pub mod outcome;
pub mod scenario;

pub use cluster::run;
