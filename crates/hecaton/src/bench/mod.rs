//! `hecaton bench`: what Hecaton costs, measured beside something everyone knows.
//!
//! Absolute times of a shared machine say little and drift while they are taken. Every bench
//! therefore measures its yardstick in the same run, in turns with the thing itself, and what it
//! promises is a ratio. Nothing here is compared with a stored number.

mod app;
mod block;
mod control;
mod failover;
mod fault;
mod harvest;
mod limited;
mod machine;
mod measure;
mod pool;
mod program;
mod stream;
mod vm;
mod world;

use anyhow::Context as _;
use std::path::PathBuf;

/// Which bench.
#[derive(clap::Subcommand)]
pub(crate) enum Bench {
    /// Latency of random page faults, beside 4 KiB round trips of plain TCP.
    Fault(fault::Args),
    /// Speed of sequential sweeps, beside one plain TCP stream.
    Stream(stream::Args),
    /// Slowdown of real programs with less local memory, beside disk swap, zram and nbdkit.
    App(app::Args),
    /// Virtual machines beside plain memory and disk swap: copying, a database, faults, fair
    /// shares.
    Vm(vm::Args),
    /// How fast harvest VMs give their memory back: with batches, readied ahead, told beforehand,
    /// several at once.
    Harvest(harvest::Args),
    /// How long faults stall when donors of a mirrored program fail; what rebuilding, draining and
    /// mirroring cost.
    Failover(failover::Args),
    /// The pool through the page protocol alone: data stored on the donors, read back, verified.
    /// Needs no userfaultfd.
    Pool(pool::Args),
    /// A volume beside nbdkit and qemu-storage-daemon, which have their data in their own memory:
    /// over NBD, and as drives over vhost-user.
    Block(block::Args),
    /// Measures the decisions on targets and grants in a large cluster, beside one pass over its
    /// statistics.
    Policy(control::policy::Args),
    /// Measures the manager's processor time and memory while thousands of nodes report to it each
    /// second, over mutual TLS.
    Manager(control::manager::Args),
    /// Runs one command under a memory limit and on a swap device, to compare with `hecaton run`.
    Limited(limited::Args),
    /// The programs that the benches run.
    #[command(hide = true, subcommand)]
    Program(program::Program),
}

/// The standard's directory for large temporary files; the other one, `/tmp`, is often in memory.
const DISK: &str = "/var/tmp";

/// Arguments of every bench.
#[derive(clap::Args)]
pub(crate) struct Common {
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Small sizes and few rounds: a try, not a measurement.
    #[arg(long)]
    quick: bool,
    /// The cluster to measure; without it, and without HECATON_MANAGER, one is started.
    #[arg(long, value_name = "URL")]
    manager: Option<String>,
    #[command(flatten)]
    place: Place,
}

/// Where a bench works.
#[derive(clap::Args)]
pub(crate) struct Place {
    /// Where temporary files go; for disk swap to mean anything it must be on a disk.
    #[arg(long, value_name = "DIR", default_value = DISK)]
    dir: PathBuf,
}

impl Place {
    /// A private directory, gone with the bench.
    fn scratch(&self) -> anyhow::Result<tempfile::TempDir> {
        tempfile::Builder::new().prefix("hecaton-bench-").tempdir_in(&self.dir).with_context(|| {
            format!("cannot make a directory in {}; name another with --dir", self.dir.display())
        })
    }
}

impl Common {
    /// As [`Place::scratch`].
    fn scratch(&self) -> anyhow::Result<tempfile::TempDir> {
        self.place.scratch()
    }

    /// Tells a waiting person what is going on.
    fn say(&self, what: &str) {
        eprintln!("bench: {what}");
    }
}

/// Runs a bench to its end.
pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    if let Bench::Program(program) = bench {
        return program::run(program);
    }
    world::interrupt::watch()?;
    match bench {
        Bench::Fault(args) => fault::run(&args),
        Bench::Stream(args) => stream::run(&args),
        Bench::App(args) => app::run(&args),
        Bench::Failover(args) => failover::run(&args),
        Bench::Vm(args) => vm::run(&args),
        Bench::Harvest(args) => harvest::run(&args),
        Bench::Pool(args) => pool::run(&args),
        Bench::Block(args) => block::run(&args),
        Bench::Policy(args) => control::policy::run(&args),
        Bench::Manager(args) => control::manager::run(&args),
        Bench::Limited(args) => limited::run(&args),
        Bench::Program(_) => unreachable!("returned above"),
    }
}
