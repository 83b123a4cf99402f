//! `hecaton node`: this host's part in a cluster.

use crate::cluster::{dir_or_default, manager_for_node};
use crate::daemons::agent::AgentArgs;
use crate::daemons::announcing::AnnounceArgs;
use crate::daemons::lending::{self, MemoryArgs, ParkArgs};
use crate::daemons::lifetime::{self, EndSignals};
use crate::listen;
use crate::nodes::{drain, node_list, recall};
use crate::terminal::failure::usage;
use crate::tls::TlsArgs;
use anyhow::Context as _;
use hecaton_manager::MetricsServer;
use hecaton_memory::Size;
use hecaton_memory::numa::{self, SYSFS_NODES};
use hecaton_node::children::child::ChildCommand;
use hecaton_node::cluster::report::{Host, check_name};
use hecaton_node::donors::{DonorMemory, DonorSpec};
use hecaton_node::{Node, NodeConfig, NodeDir};
use std::env;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Arguments of `hecaton node`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    daemon: Daemon,
}

/// Commands about running nodes.
#[derive(clap::Subcommand)]
enum Action {
    /// Lists the nodes of the cluster
    List(node_list::ListArgs),
    /// Forgets a node that is gone, in whose memory nobody has anything any more; one that ends in
    /// good order is forgotten by itself, any other one after an hour
    Remove(node_list::RemoveArgs),
    /// Empties a donor while its borrowers run, so that it can be switched off
    Drain(drain::Args),
    /// Takes a part of a donor's memory back while its borrowers run, and has it lend less
    Recall(recall::Args),
}

/// Arguments of the node daemon.
#[derive(clap::Args)]
struct Daemon {
    /// The manager of the cluster, or several with commas between [default: HECATON_MANAGER]; with
    /// --announce there need not be one
    #[arg(long, value_name = "URL,...")]
    manager: Option<String>,
    /// The node's name in the cluster
    // Needed unless a subcommand is named, which only clap knows to say.
    #[arg(long, required = true)]
    name: Option<String>,
    /// Memory that the node lends, taken from the host only as it is used; without it, the node
    /// only borrows
    #[arg(long, value_name = "SIZE")]
    lend: Option<Size>,
    /// Asks for some of what it has lent back while the host has less than that available, and
    /// lends more again later
    #[arg(long, value_name = "SIZE", requires = "lend", conflicts_with = "huge_pages")]
    keep_free: Option<Size>,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    park: ParkArgs,
    /// Where the node stands, from the outside in: copies go to hosts that differ in the first
    /// name, and near donors are taken before far ones
    #[arg(long, value_name = "RACK/CHASSIS", value_parser = location)]
    location: Option<String>,
    /// Where the node's donor serves pages; port 0 takes a free one. Each further donor
    /// takes the next port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0", requires = "lend")]
    listen: SocketAddr,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    announce: AnnounceArgs,
    /// Serves metrics for Prometheus at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Gets the certificate for --tls-dir with the token in this file, if there is none that is
    /// good; - reads it from standard input
    #[arg(long, value_name = "FILE")]
    join: Option<PathBuf>,
    /// Takes addresses that other hosts can reach, though nothing is encrypted or authenticated
    #[arg(long)]
    insecure: bool,
    /// How long donors and pagers go on without the node when it is killed, for another one that is
    /// started in its directory to adopt them; with 0, donors end with their node
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    adopt_within: u64,
    /// The directory for the node's sockets [default: $XDG_RUNTIME_DIR/hecaton, or
    /// /tmp/hecaton-UID]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(crate) fn run(args: Args, log_json: bool) -> anyhow::Result<ExitCode> {
    match (args.action, args.daemon.name.clone()) {
        (Some(Action::List(args)), _) => node_list::list(&args),
        (Some(Action::Remove(args)), _) => node_list::remove(&args),
        (Some(Action::Drain(args)), _) => drain::run(&args),
        (Some(Action::Recall(args)), _) => recall::run(&args),
        (None, Some(name)) => run_daemon(args.daemon, name, log_json),
        (None, None) => usage!("the node needs a --name"),
    }
}

/// A path of names.
fn location(text: &str) -> Result<String, &'static str> {
    let is_name = |name: &str| !name.trim().is_empty() && !name.contains(char::is_control);
    let names = text.split('/');
    if names.clone().count() <= 8 && names.clone().all(is_name) {
        Ok(text.to_owned())
    } else {
        Err("a location is up to 8 names with a slash between any two, as in rack1/chassis2")
    }
}

fn run_daemon(args: Daemon, name: String, log_json: bool) -> anyhow::Result<ExitCode> {
    let agent = args.agent.check()?;
    let mut donors = donors(&args, &name, agent.is_some())?;
    let manager_url = manager_for_node(args.manager.clone(), args.announce.is_wanted())?;
    if let Err(error) = check_name(&name) {
        usage!("--name: {error}");
    }
    if let Some(file) = &args.join {
        args.tls.join(file, &name)?;
    }
    let credentials = args.tls.for_node(manager_url.as_deref(), &name)?;
    listen::check("--listen", args.listen, args.insecure || credentials.is_some())?;
    for donor in &mut donors {
        donor.tls_dir = credentials.as_ref().map(|credentials| credentials.dir().to_owned());
    }
    if let Some(address) = args.metrics {
        listen::check("--metrics", address, args.insecure)?;
    }
    let lends_at = args.lend.map(|_| args.listen);
    let announce = args.announce.join(lends_at, args.insecure)?;
    let (runtime, mut signals) = lifetime::begin()?;
    let dir = NodeDir::claim(&dir_or_default(args.dir.as_deref()))?;
    let node = Arc::new(Node::start(NodeConfig {
        name,
        location: args.location,
        copies: 1,
        dir,
        donors,
        manager_url,
        announce,
        credentials,
        command: child_command(log_json)?,
        adopt_within: Some(Duration::from_secs(args.adopt_within)),
        agent,
    })?);
    let served = serve(&runtime, &node, args.metrics, &mut signals);
    node.stop();
    served?;
    Ok(ExitCode::SUCCESS)
}

fn serve(
    runtime: &Runtime,
    node: &Arc<Node>,
    metrics: Option<SocketAddr>,
    signals: &mut EndSignals,
) -> anyhow::Result<()> {
    runtime.block_on(async {
        let metrics = match metrics {
            Some(address) => {
                let node = Arc::clone(node);
                Some(MetricsServer::start(address, move || vec![node.report()]).await?)
            }
            None => None,
        };
        signals.next().await;
        lifetime::drain(node, signals).await;
        if let Some(metrics) = metrics {
            metrics.stop().await;
        }
        Ok(())
    })
}

/// One; where an agent divides several NUMA nodes, one for each of them.
fn donors(args: &Daemon, name: &str, has_agent: bool) -> anyhow::Result<Vec<DonorSpec>> {
    let Some(lend) = args.lend else { return Ok(Vec::new()) };
    lending::check_least(lend)?;
    let host = Host::here().context("cannot read /proc")?;
    lending::check_total(lend, 1, &host)?;
    if let Some(keep_free) = args.keep_free {
        lending::check_kept(keep_free, &host)?;
    }
    let memory = args.memory.check(lend, 1)?;
    let keep_free_bytes = args.keep_free.map(|Size(bytes)| bytes);
    let (park, listen) = (args.park.check()?, args.listen);
    let (name, lend_bytes) = (name.to_owned(), lend.0);
    let donor =
        DonorSpec { name, lend_bytes, memory, keep_free_bytes, park, tls_dir: None, listen };
    let nodes = numa::nodes(Path::new(SYSFS_NODES)).context("cannot read the host's NUMA nodes")?;
    let is_limited_by_node = has_agent && !memory.huge_pages && memory.numa_node.is_none();
    if !is_limited_by_node || nodes.len() < 2 {
        return Ok(vec![donor]);
    }
    if args.keep_free.is_some() {
        usage!(
            "--keep-free looks at all of the host, and its agent at each of its {} NUMA nodes: leave it out, and have \
             the agent keep memory free by --buffer or --manage",
            nodes.len()
        );
    }
    lending::parts(lend, &nodes)
        .into_iter()
        .zip(0..)
        .map(|((node, lend_bytes), number)| {
            let name = format!("{}-numa{node}", donor.name);
            let memory = DonorMemory { numa_node: Some(node), ..memory };
            let listen = nth_port(args.listen, number)?;
            Ok(DonorSpec { name, lend_bytes, memory, listen, ..donor.clone() })
        })
        .collect()
}

/// Where a further donor serves: at the next port, unless any will do.
fn nth_port(first: SocketAddr, number: u16) -> anyhow::Result<SocketAddr> {
    if first.port() == 0 {
        return Ok(first);
    }
    let Some(port) = first.port().checked_add(number) else {
        usage!(
            "--listen {first}: there is a donor for each NUMA node, each at the port after the one before; give a lower one"
        );
    };
    Ok(SocketAddr::new(first.ip(), port))
}

/// How the node starts its donors and pagers: with this very executable.
pub(crate) fn child_command(log_json: bool) -> anyhow::Result<ChildCommand> {
    let program = env::current_exe().context("cannot tell where the hecaton command is")?;
    let args = if log_json { vec!["--log-json".into()] } else { Vec::new() };
    Ok(ChildCommand { program, args })
}
