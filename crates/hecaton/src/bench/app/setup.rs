//! Sets up the memory of a program for one run.

use super::swap::{Kind, Swap};
use crate::bench::world::cluster::{Cluster, PoolMemory};
use crate::bench::world::process::eventually;
use crate::cgroup::Cgroup;
use anyhow::ensure;
use std::{ffi::OsStr, path::Path, process::Command, time::Duration};

/// How a program gets memory beyond its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Method {
    Hecaton,
    /// Hecaton, with two copies of each page in the pool.
    HecatonMirrored,
    /// The kernel swaps to the same pool.
    HecatonSwap,
    Swap(Kind),
}

impl Method {
    pub(super) const ALL: [Self; 6] = [
        Self::Hecaton,
        Self::HecatonMirrored,
        Self::HecatonSwap,
        Self::Swap(Kind::ALL[0]),
        Self::Swap(Kind::ALL[1]),
        Self::Swap(Kind::ALL[2]),
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hecaton => "Hecaton",
            Self::HecatonMirrored => "Hecaton, 2 copies",
            Self::HecatonSwap => "Hecaton swap",
            Self::Swap(kind) => kind.name(),
        }
    }
}

/// The setup of one run, in place until it goes out of scope.
pub(in crate::bench) enum Setup<'a> {
    /// All memory local and no limit.
    Local,
    Hecaton {
        cluster: &'a Cluster,
        local: u64,
        pool: PoolMemory,
    },
    /// `hecaton run` creates the cgroup and the swap.
    HecatonSwap {
        cluster: &'a Cluster,
        local: u64,
        swap: u64,
    },
    /// Drops the cgroup before the swap: the group must be empty before the device can go.
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
        let name = format!("hecaton-bench-{}-app", std::process::id());
        let swap = Box::new(Swap::open(kind, bytes, dir)?);
        Ok(Self::Limited { cgroup: Cgroup::new(&name, limit)?, swap })
    }

    /// A command for `program` in this setup, ready for its arguments.
    pub(in crate::bench) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        match self {
            Self::Local => Command::new(program),
            Self::Hecaton { cluster, local, pool } => cluster.run(*local, *pool, None, program),
            Self::HecatonSwap { cluster, local, swap } => {
                cluster.run_via_swap(*local, *swap, program)
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

/// Removing the swap of a run takes long, because the kernel reads all of it back first.
const SWAP_PATIENCE: Duration = Duration::from_secs(60);

/// Fails unless programs can be given swap here.
pub(super) fn check_swap() -> anyhow::Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "swap devices need root");
    super::swap::check_none()
}

/// Waits until the previous run's swap is gone: its holder outlives a program that was given up.
pub(super) fn wait_for_no_swap() -> anyhow::Result<()> {
    eventually(SWAP_PATIENCE, super::swap::check_none)
}
