//! Drives the real `hecaton` command: what it refuses, and clusters on this machine.

mod cluster;
mod common;
mod election;
mod etcd_tls;
mod guest;
mod memory;
mod nodes;
mod registry;
mod restart;
mod tls;
mod usage;
