//! A cluster without hosts: the paper's evaluation, again, on the code that decides.
//!
//! Nodes, their consumers' demand for memory, their disks and the messages between nodes and
//! manager are modelled in steps of a tenth of a second; what is *decided* is decided by
//! [`crate::cluster`], as in a daemon: [`cluster::membership`](crate::cluster::membership) and
//! [`cluster::member`](crate::cluster::member) for who takes part and owns what,
//! [`cluster::targets`](crate::cluster::targets) and [`cluster::grants`](crate::cluster::grants)
//! for who may hold how much. The same scenario, policy and seed give the same outcome on every
//! machine.
//!
//! What the model is, and where it is coarse: [`machine`] for consumers and disks, [`scenario`] for
//! what runs, [`demand`] for what was recorded of it. The times are the model's. They compare
//! policies with each other under equal conditions, and are no forecast of a real cluster's.

mod cluster;
pub mod demand;
pub mod machine;
pub mod outcome;
pub mod scenario;

pub use cluster::run;
