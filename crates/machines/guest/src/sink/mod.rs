//! The ways in which applications are told.

mod cgroup;
mod connection;
mod hook;
mod jvm;
mod memcached;
mod program;
mod redis;

pub(crate) use cgroup::Cgroup;
pub use connection::Address;
pub(crate) use hook::Hook;
pub(crate) use jvm::Jvm;
pub(crate) use memcached::Memcached;
pub(crate) use program::run as run_program;
pub(crate) use redis::Redis;

use crate::governor::Order;
use hecaton_memory::Size;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One way to tell an application. Every call ends within seconds, whatever the application does.
pub(crate) trait Sink: Send {
    /// Tells it, and says how far it is. Called again until it has settled, with the same order or
    /// a later one.
    fn tell(&mut self, order: &Order) -> Result<Progress, SinkError>;

    /// Called now and then with an order that has settled: an application that was started again
    /// has forgotten its limit.
    fn keep(&mut self, order: &Order) -> Result<(), SinkError>;
}

/// How far an application is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// It has done it.
    Settled,
    /// It has more than its limit still, and gives back.
    Draining,
}

impl Progress {
    /// Progress of an application that uses `used_bytes` and may use `limit_bytes`.
    fn of(used_bytes: u64, limit_bytes: u64) -> Progress {
        if used_bytes <= limit_bytes { Progress::Settled } else { Progress::Draining }
    }
}

/// Set once the manager ends; programs that it runs end then too.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ending(Arc<AtomicBool>);

impl Ending {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why an application could not be told.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SinkError {
    #[error("cannot reach {address}: {source}; does it run, and listen there?")]
    Unreachable { address: Address, source: io::Error },
    #[error("{address} did not answer `{command}`: {source}")]
    Silent { address: Address, command: String, source: io::Error },
    #[error("{address} refused `{command}`: {reason}")]
    Refused { address: Address, command: String, reason: String },
    #[error(
        "Redis has {} and may have {}, and its maxmemory-policy is noeviction: it refuses writes instead of dropping \
         keys; set another one, such as allkeys-lru", Size(*.used_bytes), Size(*.limit_bytes)
    )]
    DropsNothing { used_bytes: u64, limit_bytes: u64 },
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {value} to {path}: {source}")]
    Write { path: PathBuf, value: u64, source: io::Error },
    #[error(
        "{0} has no memory.high; name the directory of a group of cgroup version 2 with the memory controller"
    )]
    NoMemoryHigh(PathBuf),
    #[error("{path} says `{text}`, and a process's number is expected")]
    NoPid { path: PathBuf, text: String },
    #[error("cannot run {program}: {source}")]
    Start { program: String, source: io::Error },
    #[error("{program} {how}")]
    Failed { program: String, how: String },
}
