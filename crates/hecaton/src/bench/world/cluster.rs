//! The cluster that a bench measures: a running one, or an embedded one for as long as it lasts.

use crate::bench::world::process::{Guarded, eventually};
use crate::daemons::dev::Ready;
use crate::daemons::lending::MIN_LEND_BYTES;
use anyhow::Context as _;
use hecaton_manager::ClusterStatus;
use hecaton_node::NodePaths;
use hecaton_node::socket::client::NodeClient;
use hecaton_space::{DonorAddress, Site};
use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// The variable by which every command finds its cluster.
const MANAGER_VARIABLE: &str = "HECATON_MANAGER";

/// Donors of a cluster that is started for a bench.
pub(crate) const DONORS: u32 = 3;

/// How long a node may take to hear of what others do.
const NEWS_PATIENCE: Duration = Duration::from_secs(10);

/// How a program's memory is held in the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PoolMemory {
    /// As the cluster does it.
    Plain,
    Encrypted,
    /// In so many copies.
    Copies(u8),
    /// In two copies, for which no more than so many bytes a second are copied.
    CopiedAt(hecaton_memory::Size),
    /// In two copies, and in [`CODE`] when it has gone cold.
    Coded,
}

/// The erasure code that is measured.
pub(crate) const CODE: &str = "4+2";

/// Donors that it takes.
pub(crate) const CODE_DONORS: u32 = 6;

/// Seconds until memory is cold. Memory that is read for half of that time is kept in copies again;
/// the measured faults take less time.
const COLD_AFTER_S: u64 = 20;

/// How long it may take until all of a program's memory is coded.
pub(crate) const CODING_PATIENCE: Duration = Duration::from_secs(180);

/// Programs started through it run on its memory.
pub(crate) struct Cluster {
    hecaton: PathBuf,
    manager: String,
    /// Words that precede each of its commands.
    prefix: Vec<OsString>,
    embedded: Option<Embedded>,
}

/// A cluster that ends with the bench.
struct Embedded {
    _process: Guarded,
    dir: PathBuf,
}

impl Cluster {
    /// The cluster at `manager`, else one of three donors with at least `bytes` between them, with
    /// its sockets in `dir`.
    pub(crate) fn find_or_start(
        manager: Option<&str>,
        bytes: u64,
        dir: &Path,
    ) -> anyhow::Result<Self> {
        let hecaton = this_program()?;
        if let Some(url) = manager.map(str::to_owned).or_else(|| env::var(MANAGER_VARIABLE).ok()) {
            let cluster = Self { hecaton, manager: url, prefix: Vec::new(), embedded: None };
            cluster.status()?;
            return Ok(cluster);
        }
        Self::start(DONORS, bytes, &dir.join("cluster"))
    }

    /// A cluster of its own with so many donors, which lend at least `bytes` between them.
    pub(crate) fn start(donors: u32, bytes: u64, dir: &Path) -> anyhow::Result<Self> {
        let hecaton = this_program()?;
        let mut embedded = Guarded::spawn(
            Command::new(&hecaton)
                .args(["dev", "--json", "--follow-stdin", "--donors", &donors.to_string()])
                .args(["--lend", &share(bytes, donors).to_string(), "--dir"])
                .arg(dir)
                // Closed when this process ends, however it ends.
                .stdin(Stdio::piped())
                .stdout(Stdio::piped()),
        )?;
        let ready = embedded.lines()?.next()?;
        // Without that line it has told the reason itself.
        let ready = ready.context("the embedded cluster does not come up")?;
        let Ready { manager, .. } = serde_json::from_str(&ready)?;
        let embedded = Embedded { _process: embedded, dir: dir.to_owned() };
        let cluster = Self { hecaton, manager, prefix: Vec::new(), embedded: Some(embedded) };
        cluster.wait_for_donors(donors as usize)?;
        Ok(cluster)
    }

    /// One that somebody else has started and ends, with what is to be put before its commands.
    pub(crate) fn of(manager: String, prefix: Vec<OsString>) -> anyhow::Result<Self> {
        Ok(Self { hecaton: this_program()?, manager, prefix, embedded: None })
    }

    pub(crate) fn wait_for_donors(&self, donors: usize) -> anyhow::Result<()> {
        eventually(Duration::from_secs(30), || {
            let serving = self.donors()?.len();
            anyhow::ensure!(serving == donors, "only {serving} of {donors} donors serve");
            Ok(())
        })
    }

    /// Waits until a node has been told of the donors: with the answer to its next heartbeat.
    pub(crate) fn wait_until_told(&self, node: &str) -> anyhow::Result<()> {
        let since = self.status()?.uptime_ms;
        eventually(NEWS_PATIENCE, || {
            let status = self.status()?;
            let node = status.nodes.iter().find(|found| found.report.name == node);
            let heard = node.map(|node| status.uptime_ms - node.silent_ms);
            anyhow::ensure!(heard > Some(since), "the borrower's node says nothing");
            Ok(())
        })
    }

    /// The node of a cluster that was started here.
    pub(crate) fn node(&self) -> anyhow::Result<NodeClient> {
        let embedded = self.embedded.as_ref().context("the cluster was not started here")?;
        let socket = NodePaths::new(&embedded.dir).control_socket();
        NodeClient::connect(&socket).context("the embedded cluster's node does not answer")
    }

    /// `hecaton vm run` on a cluster that was started here, ready for QEMU and its arguments.
    pub(crate) fn run_machine(
        &self,
        name: &str,
        memory: u64,
        local: u64,
    ) -> anyhow::Result<Command> {
        let embedded = self.embedded.as_ref().context("the cluster was not started here")?;
        let mut command = self.command("vm");
        command.args(["run", "--name", name, "--memory", &memory.to_string()]);
        command.arg("--local").arg(whole_pages(local)).arg("--dir").arg(&embedded.dir).arg("--");
        Ok(command)
    }

    pub(crate) fn status(&self) -> anyhow::Result<ClusterStatus> {
        let output = self.command("status").arg("--json").output()?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "{}", complaint.trim());
        serde_json::from_slice(&output.stdout).context("`hecaton status --json` is not understood")
    }

    /// Where the donors serve pages.
    pub(crate) fn donors(&self) -> anyhow::Result<Vec<DonorAddress>> {
        let nodes = self.status()?.nodes;
        let donors = nodes.iter().flat_map(|node| node.report.donor_addresses());
        let known = |donor: hecaton_node::cluster::report::DonorAddress| DonorAddress {
            name: donor.name,
            site: Site { host: donor.node, location: donor.location },
            addr: donor.address,
        };
        Ok(donors.map(known).collect())
    }

    pub(crate) fn command(&self, subcommand: &str) -> Command {
        let words = self.prefix.iter().map(OsString::as_os_str);
        let mut words = words.chain([self.hecaton.as_os_str()]);
        let mut command = Command::new(words.next().expect("there is the program at least"));
        command.args(words).arg(subcommand).env(MANAGER_VARIABLE, &self.manager);
        command
    }

    /// `program` with `local` bytes of memory here and the rest in the pool, as `pool` wants it.
    /// Statistics go to `stats` when it has ended.
    pub(crate) fn run(
        &self,
        local: u64,
        pool: PoolMemory,
        stats: Option<&Path>,
        program: impl AsRef<OsStr>,
    ) -> Command {
        let mut command = self.command("run");
        command.arg("--local").arg(whole_pages(local));
        match pool {
            PoolMemory::Plain => {}
            PoolMemory::Encrypted => drop(command.arg("--encrypt")),
            PoolMemory::Copies(copies) => drop(command.args(["--mirror", &copies.to_string()])),
            PoolMemory::CopiedAt(bytes_per_s) => {
                command.args(["--mirror", "2", "--copying", &bytes_per_s.0.to_string()]);
            }
            PoolMemory::Coded => {
                command.args(["--mirror", "2", "--ec", CODE]);
                command.args(["--cold-after", &COLD_AFTER_S.to_string()]);
            }
        }
        if let Some(stats) = stats {
            command.arg("--stats").arg(stats);
        }
        command.arg("--").arg(program);
        command
    }

    /// `program` with `local` bytes of memory here, and the kernel swapping the rest to the pool.
    pub(crate) fn run_via_swap(
        &self,
        local: u64,
        swap: u64,
        program: impl AsRef<OsStr>,
    ) -> Command {
        let mut command = self.command("run");
        command.args(["--via", "swap", "--local"]).arg(whole_pages(local));
        command.arg("--swap").arg(whole_pages(swap)).arg("--").arg(program);
        command
    }

    /// One of the bench's own programs, in the same way.
    pub(crate) fn run_own(&self, local: u64, pool: PoolMemory, program: &str) -> Command {
        let mut command = self.run(local, pool, None, &self.hecaton);
        command.args(["bench", "program", program]);
        command
    }
}

/// Bytes that each donor lends: whole mebibytes.
pub(crate) fn share(bytes: u64, donors: u32) -> u64 {
    bytes.div_ceil(u64::from(donors)).next_multiple_of(1 << 20).max(MIN_LEND_BYTES)
}

/// A size in bytes, without a unit, rounded up to pages.
fn whole_pages(bytes: u64) -> String {
    bytes.next_multiple_of(hecaton_memory::PAGE_SIZE as u64).to_string()
}

/// The executable that this process runs, under the name that it was started by: a path through
/// /proc/self/exe would not lead to the library beside it.
pub(crate) fn this_program() -> anyhow::Result<PathBuf> {
    env::current_exe().context("cannot tell where the hecaton command is")
}
