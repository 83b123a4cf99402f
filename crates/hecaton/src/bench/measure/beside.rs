//! Measures encryption and TLS beside plain pool memory, to show their cost.

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
    /// Measures between nodes with certificates too, whose pages travel by mutual TLS, and says
    /// what that costs; all in clusters of its own.
    #[arg(long, conflicts_with = "manager")]
    tls: bool,
}

/// Results for each kind of pool memory.
pub(crate) struct Measured<T> {
    pub(crate) plain: T,
    pub(crate) encrypted: Option<T>,
    pub(crate) tls: Option<T>,
}

impl Beside {
    /// Measures on a cluster that lends at least `bytes`, with its files in `dir`, and on another
    /// cluster for TLS. `measure` receives the kind's name as a suffix for messages.
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
        // One cluster at a time: an idle one takes processor time, too.
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
    /// Each result, with the kind's name as a suffix.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&T, &'static str)> {
        let beside = [(&self.encrypted, ENCRYPTED), (&self.tls, TLS)];
        let beside = beside.into_iter().filter_map(|(of, how)| Some((of.as_ref()?, how)));
        [(&self.plain, "")].into_iter().chain(beside)
    }

    /// Compares the encrypted result and the TLS result with the plain one.
    pub(crate) fn compare<'a, U>(
        &'a self,
        compare: impl Fn(&'a T, &'a T) -> U,
    ) -> (Option<U>, Option<U>) {
        let compared = |of: &'a Option<T>| of.as_ref().map(|of| compare(of, &self.plain));
        (compared(&self.encrypted), compared(&self.tls))
    }
}
