//! What is measured beside plain pool memory, to say what it costs.

use crate::bench::Common;
use crate::bench::world::certified::Certified;
use crate::bench::world::cluster::{Cluster, DONORS, PoolMemory};
use std::path::Path;

/// Kinds of pool memory to measure, too.
#[derive(clap::Args)]
pub(crate) struct Beside {
    /// Measures with `--encrypt` too, and says what it costs.
    #[arg(long)]
    encrypt: bool,
    /// Measures between nodes with certificates too, whose pages travel by mutual TLS, and says what that costs; all
    /// in clusters of its own.
    #[arg(long, conflicts_with = "manager")]
    tls: bool,
}

/// What was measured with each.
pub(crate) struct Measured<T> {
    pub(crate) plain: T,
    pub(crate) encrypted: Option<T>,
    pub(crate) tls: Option<T>,
}

impl Beside {
    /// Measures on a cluster that lends at least `bytes`, with its files in `dir`, and on another one for TLS.
    /// `measure` is told what to call it, in words that follow others.
    pub(crate) fn measure<T>(
        &self,
        common: &Common,
        bytes: u64,
        dir: &Path,
        measure: impl Fn(&Cluster, PoolMemory, &str) -> anyhow::Result<T>,
    ) -> anyhow::Result<Measured<T>> {
        let cluster = match self.tls {
            true => Cluster::start(DONORS, bytes, &dir.join("cluster"))?,
            false => Cluster::find_or_start(common.manager.as_deref(), bytes, dir)?,
        };
        let plain = measure(&cluster, PoolMemory::Plain, "")?;
        let encrypted = self.encrypt.then(|| measure(&cluster, PoolMemory::Encrypted, ENCRYPTED));
        let encrypted = encrypted.transpose()?;
        // One at a time: what is idle takes processors, too.
        drop(cluster);
        let tls = self.tls.then(|| {
            let certified = Certified::start(DONORS, bytes, &dir.join("certified"))?;
            measure(&certified.cluster, PoolMemory::Plain, TLS)
        });
        Ok(Measured { plain, encrypted, tls: tls.transpose()? })
    }
}

const ENCRYPTED: &str = ", encrypted";
const TLS: &str = ", over TLS";

impl<T> Measured<T> {
    /// Each, with the words for it.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&T, &'static str)> {
        let beside = [(&self.encrypted, ENCRYPTED), (&self.tls, TLS)];
        let beside = beside.into_iter().filter_map(|(of, how)| Some((of.as_ref()?, how)));
        [(&self.plain, "")].into_iter().chain(beside)
    }

    /// Of those beside plain memory: something that is said of both.
    pub(crate) fn compare<'a, U>(
        &'a self,
        compare: impl Fn(&'a T, &'a T) -> U,
    ) -> (Option<U>, Option<U>) {
        let compared = |of: &'a Option<T>| of.as_ref().map(|of| compare(of, &self.plain));
        (compared(&self.encrypted), compared(&self.tls))
    }
}
