//! What a program's memory is made of in one run.

use super::{
    cgroup::Cgroup,
    swap::{Kind, Swap},
};
use crate::bench::cluster::{Cluster, PoolMemory};
use std::{ffi::OsStr, path::Path, process::Command};

/// How memory beyond the limit is had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Method {
    Hecaton,
    Swap(Kind),
}

impl Method {
    pub(super) const ALL: [Self; 4] = [
        Self::Hecaton,
        Self::Swap(Kind::ALL[0]),
        Self::Swap(Kind::ALL[1]),
        Self::Swap(Kind::ALL[2]),
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hecaton => "Hecaton",
            Self::Swap(kind) => kind.name(),
        }
    }
}

/// The surroundings of one run, in place until it goes out of scope.
pub(in crate::bench) enum Setup<'a> {
    /// All memory local and no limit.
    Local,
    Hecaton {
        cluster: &'a Cluster,
        local: u64,
    },
    /// The group before the swap: it must be empty before the device can go.
    Limited {
        cgroup: Cgroup,
        swap: Box<Swap>,
    },
}

impl Setup<'_> {
    /// At most `limit` bytes local, and `bytes` of swap.
    pub(in crate::bench) fn limited(
        kind: Kind,
        limit: u64,
        bytes: u64,
        dir: &Path,
    ) -> anyhow::Result<Self> {
        let swap = Box::new(Swap::open(kind, bytes, dir)?);
        Ok(Self::Limited { cgroup: Cgroup::new("app", limit)?, swap })
    }

    /// `program` in these surroundings, ready for its arguments.
    pub(in crate::bench) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        match self {
            Self::Local => Command::new(program),
            Self::Hecaton { cluster, local } => {
                cluster.run(*local, PoolMemory::Plain, None, program)
            }
            Self::Limited { cgroup, .. } => cgroup.command(program),
        }
    }

    pub(in crate::bench) fn own_local_bytes(&self) -> Option<u64> {
        match self {
            Self::Limited { swap, .. } => swap.own_local_bytes(),
            _ => None,
        }
    }
}
