//! `hecaton dev`: a whole cluster on this machine.
//!
//! One process is the manager and the node; each donor is a process of its own, as it would be on
//! another host, and can be killed like one. It is also what `hecaton run` starts when there is no
//! cluster: then it lives until that command is gone and nothing uses the pool any more.

use crate::cluster::dir_or_default;
use crate::daemons::lending::{self, MIN_LEND_BYTES, MemoryArgs, ParkArgs};
use crate::daemons::lifetime;
use crate::daemons::node;
use crate::listen;
use crate::out;
use anyhow::Context as _;
use hecaton_manager::{Keep, ManagerServer};
use hecaton_memory::Size;
use hecaton_node::cluster::report::Host;
use hecaton_node::donors::DonorSpec;
use hecaton_node::{Node, NodeConfig, NodeDir};
use hecaton_space::group::MAX_COPIES;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

/// The name of the one node of a development cluster.
const NODE: &str = "local";

/// Default sizes are whole multiples of this.
const LEND_STEP: u64 = 64 << 20;

/// Arguments of `hecaton dev`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many donors
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=hecaton_node::node::MAX_DONORS as i64))]
    donors: u16,
    /// Memory that each donor lends, taken from the host only as it is used [default: half of the
    /// memory that is available, shared by the donors]
    #[arg(long, value_name = "SIZE")]
    lend: Option<Size>,
    /// Copies of each page that programs and machines of this cluster keep, unless they say
    /// otherwise: 1 to 3
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_COPIES)))]
    mirror: u8,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    park: ParkArgs,
    /// The directory for the cluster's sockets [default: $XDG_RUNTIME_DIR/hecaton, or
    /// /tmp/hecaton-UID]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Where the manager listens; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Prints one line of JSON when the cluster is ready
    #[arg(long)]
    json: bool,
    /// Ends when standard input is closed and nothing uses the pool
    #[arg(long, hide = true)]
    follow_stdin: bool,
}

/// JSON line that `--json` prints.
#[derive(Serialize, Deserialize)]
pub(crate) struct Ready {
    /// The manager's base URL.
    pub(crate) manager: String,
    /// The cluster's directory.
    pub(crate) dir: PathBuf,
    /// The donors.
    pub(crate) donors: Vec<ReadyDonor>,
}

/// A donor in [`Ready`].
#[derive(Serialize, Deserialize)]
pub(crate) struct ReadyDonor {
    name: String,
    address: Option<SocketAddr>,
    lend_bytes: u64,
}

pub(crate) fn run(args: Args, log_json: bool) -> anyhow::Result<ExitCode> {
    listen::check("--listen", args.listen, false)?;
    let host = Host::here().context("cannot read /proc")?;
    let lend = lend(&args, &host)?;
    let memory = args.memory.check(lend, args.donors)?;
    let park = args.park.check()?;
    let (runtime, mut signals) = lifetime::begin()?;
    let dir = NodeDir::claim(&dir_or_default(args.dir.as_deref()))?;
    let manager = runtime.block_on(ManagerServer::start(args.listen, Keep::InMemory, None))?;
    let donors = (1..=args.donors).map(|number| DonorSpec {
        name: format!("donor-{number}"),
        lend_bytes: lend.0,
        memory,
        keep_free_bytes: None,
        park: park.clone(),
        tls_dir: None,
        listen: (Ipv4Addr::LOCALHOST, 0).into(),
    });
    let node = Node::start(NodeConfig {
        name: NODE.to_owned(),
        location: None,
        copies: args.mirror,
        dir,
        donors: donors.collect(),
        manager_url: Some(manager.url()),
        announce: None,
        credentials: None,
        command: node::child_command(log_json)?,
        // Manager and node are one process here, and what it started ends with it.
        adopt_within: None,
        agent: None,
    })?;
    announce(&args, &manager, &node)?;
    runtime.block_on(async {
        if args.follow_stdin {
            tokio::select! {
                () = async {
                    lifetime::stdin_closed().await;
                    lifetime::no_consumers(&node).await;
                } => {}
                () = signals.next() => lifetime::drain(&node, &mut signals).await,
            }
        } else {
            signals.next().await;
            lifetime::drain(&node, &mut signals).await;
        }
    });
    node.stop();
    runtime.block_on(manager.stop());
    Ok(ExitCode::SUCCESS)
}

/// Returns the memory that each donor lends.
fn lend(args: &Args, host: &Host) -> anyhow::Result<Size> {
    let Some(lend) = args.lend else {
        let share = host.available_bytes / 2 / u64::from(args.donors);
        return Ok(Size((share / LEND_STEP * LEND_STEP).max(MIN_LEND_BYTES)));
    };
    lending::check_least(lend)?;
    lending::check_total(lend, args.donors, host)?;
    Ok(lend)
}

fn announce(args: &Args, manager: &ManagerServer, node: &Node) -> anyhow::Result<()> {
    let report = node.report();
    let dir = dir_or_default(args.dir.as_deref());
    if args.json {
        let donors = report.donors.into_iter().map(|donor| ReadyDonor {
            name: donor.name,
            address: donor.address,
            lend_bytes: donor.lend_bytes,
        });
        let ready = Ready { manager: manager.url(), dir, donors: donors.collect() };
        out::announce(format_args!("{}", serde_json::to_string(&ready)?));
        return Ok(());
    }
    let lend: u64 = report.donors.iter().map(|donor| donor.lend_bytes).sum();
    let option = match &args.dir {
        Some(dir) => format!(" --dir {}", dir.display()),
        None => String::new(),
    };
    out::announce(format_args!(
        "The cluster is ready: {} donors lend {}. Its manager, and its dashboard in a browser:\n    \
         {}\n    \
         hecaton run{option} -- COMMAND    runs a program on it\n    \
         hecaton status{option}            shows what it holds\n    \
         hecaton top{option}               shows it live\n\
         Ctrl-C ends it.",
        report.donors.len(),
        Size(lend),
        manager.url(),
    ));
    Ok(())
}
