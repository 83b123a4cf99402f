//! Everything that tests share and that tests nothing: the runner, worlds, clusters, guests.

pub(crate) mod browser;
pub(crate) mod cluster;
pub(crate) mod fio;
pub(crate) mod guest;
pub(crate) mod process;
pub(crate) mod runner;
pub(crate) mod verifier;
pub(crate) mod wait;
pub(crate) mod whole;
pub(crate) mod world;

pub(crate) use runner::{Outcome, TestResult};
