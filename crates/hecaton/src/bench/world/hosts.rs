//! A cluster whose nodes are on hosts of their own, as far as the network goes: each in a network
//! namespace, so that it can be cut off, and killed with all that it has lent.

use crate::bench::world::cluster::{Cluster, this_program};
use crate::bench::world::process::{Guarded, eventually, require};
use anyhow::{Context as _, ensure};
use hecaton_netns::{Network, cluster};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

/// How many hosts of a network are needed.
pub(crate) const HOSTS: usize = 5;

/// Where programs run. It lends nothing.
pub(crate) const BORROWER: usize = 0;
/// Hosts that lend: as many as an embedded cluster has donors.
pub(crate) const LENDERS: [usize; 3] = [1, 2, 3];
const MANAGER: usize = 4;

/// How long a killed process may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);

/// The processes; they end with it.
pub(crate) struct Hosts {
    // Dropped in this order: nodes, then the manager, then the hosts.
    lenders: Vec<Guarded>,
    _borrower: Guarded,
    _manager: Guarded,
    pub(crate) network: Network,
    hecaton: PathBuf,
    lend_bytes: u64,
    dir: PathBuf,
}

impl Hosts {
    /// On a network of [`HOSTS`], with sockets in `dir`; each lender lends so many bytes.
    pub(crate) fn start(network: Network, lend_bytes: u64, dir: &Path) -> anyhow::Result<Self> {
        require("nsenter", "util-linux")?;
        let hecaton = this_program()?;
        let mut command =
            cluster::manager(&hecaton, network.host(MANAGER), &directory(dir, MANAGER)?);
        let mut manager = Guarded::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
        // Without a line it has told the reason itself.
        manager.lines()?.next()?.context("the manager does not come up")?;
        let node = |host| start_node(&network, &hecaton, host, lend_bytes, dir);
        let lenders = LENDERS.into_iter().map(node).collect::<anyhow::Result<_>>()?;
        let borrower = node(BORROWER)?;
        let dir = dir.to_owned();
        let (_borrower, _manager) = (borrower, manager);
        Ok(Self { lenders, _borrower, _manager, network, hecaton, lend_bytes, dir })
    }

    /// The cluster, for commands that run where the borrower is.
    pub(crate) fn cluster(&self) -> anyhow::Result<Cluster> {
        let prefix = cluster::prefix(self.network.host(BORROWER), &directory(&self.dir, BORROWER)?);
        let cluster = Cluster::of(cluster::manager_url(self.network.host(MANAGER)), prefix)?;
        cluster.wait_for_donors(LENDERS.len())?;
        cluster.wait_until_told(&self.network.host(BORROWER).name())?;
        Ok(cluster)
    }

    /// The host of that name.
    pub(crate) fn host_named(&self, name: &str) -> anyhow::Result<usize> {
        let mut lenders = LENDERS.into_iter();
        let found = lenders.find(|&host| self.network.host(host).name() == name);
        found.with_context(|| format!("no host is called {name}"))
    }

    /// Kills a lender's node and donor: what it had lent is gone.
    pub(crate) fn kill_lender(&mut self, host: usize, donor: u32) -> anyhow::Result<()> {
        let node = &mut self.lenders[host - LENDERS[0]];
        for id in [node.id(), donor] {
            kill(id, Signal::KILL)?;
        }
        let ended = node.wait_until(Instant::now() + PATIENCE)?;
        ensure!(ended.is_some(), "the node of host {host} does not end on SIGKILL");
        Ok(())
    }

    /// Starts a lender that was killed anew, at the same address.
    pub(crate) fn restart_lender(&mut self, cluster: &Cluster, host: usize) -> anyhow::Result<()> {
        // The manager refuses its name as long as it takes the node before for alive: five seconds.
        eventually(PATIENCE, || {
            let (network, dir) = (&self.network, &self.dir);
            let mut node = start_node(network, &self.hecaton, host, self.lend_bytes, dir)?;
            let id = node.id();
            let has_ended = eventually(PATIENCE, || {
                let has_ended = node.exit_status()?.is_some();
                let is_known = || -> anyhow::Result<bool> {
                    Ok(cluster.status()?.nodes.iter().any(|node| node.report.pid == id))
                };
                ensure!(has_ended || is_known()?, "the node is not known");
                Ok(has_ended)
            })?;
            ensure!(!has_ended, "the node of host {host} ends at once");
            self.lenders[host - LENDERS[0]] = node;
            Ok(())
        })
    }
}

/// Sends a signal to a process of a cluster that the bench has started.
pub(crate) fn kill(id: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw).context("not a process id")?;
    kill_process(pid, signal).with_context(|| format!("cannot signal process {id}"))
}

fn start_node(
    network: &Network,
    hecaton: &Path,
    host: usize,
    lend_bytes: u64,
    dir: &Path,
) -> anyhow::Result<Guarded> {
    let lend = LENDERS.contains(&host).then_some(lend_bytes);
    let own = directory(dir, host)?;
    let manager = network.host(MANAGER);
    let mut command = cluster::node(hecaton, network.host(host), &own, manager, lend);
    // That donors end and are silent is what is measured, and no news.
    command.env("HECATON_LOG", "error");
    Guarded::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()))
}

/// A host's own directory.
fn directory(dir: &Path, host: usize) -> anyhow::Result<PathBuf> {
    let directory = dir.join(format!("host-{host}"));
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    Ok(directory)
}
