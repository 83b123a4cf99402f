//! `hecaton vm attach`: a pager for a machine that is started by something else than Hecaton, and
//! not by libvirt. Prints the library and the socket for the start, and ends when the machine has
//! ended.

use crate::cluster::ClusterArgs;
use crate::placement::{PoolArgs, RangeArgs};
use crate::run::library;
use anyhow::{Context as _, bail};
use hecaton_memory::Size;
use hecaton_node::socket::client::{ClientError, NodeClient};
use hecaton_node::socket::launcher::Launched;
use hecaton_node::socket::message::StartVm;
use hecaton_pager::Guest;
use hecaton_uffd::guest_ram::SOCKET_VARIABLE;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// How often it is looked whether the machine has come.
const INTERVAL: Duration = Duration::from_millis(500);

/// Arguments of `hecaton vm attach`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The machine's name in the cluster
    name: String,
    /// The part of its memory that stays on this host
    #[arg(long, value_name = "SIZE")]
    local: Size,
    /// The socket of a QMP monitor that the machine has for Hecaton alone: without one it is not
    /// stopped when memory is lost, but waits for it
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// The machine is Firecracker's, and restores a snapshot: the socket for its
    /// `mem_backend.backend_path`
    #[arg(long, value_name = "SOCKET", requires = "image")]
    firecracker: Option<PathBuf>,
    /// The snapshot's memory file
    #[arg(long, value_name = "FILE", requires = "firecracker")]
    image: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pool: PoolArgs,
    #[command(flatten)]
    ranges: RangeArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Library and socket that the machine must be started with.
#[derive(Serialize)]
struct Needs<'a> {
    name: &'a str,
    /// To be preloaded; Firecracker needs none.
    library: Option<PathBuf>,
    /// Where it hands its memory over.
    socket: PathBuf,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    crate::run::check_local(args.local.0)?;
    let wanted = args.pool.check_with(&args.ranges)?;
    let library = library::find()?;
    let mut client = args.cluster.need_local_node()?;
    let monitor = args.qmp.map(std::path::absolute).transpose().context("--qmp")?;
    let guest = match (args.firecracker, args.image) {
        (Some(socket), Some(image)) => Guest::Firecracker {
            socket: std::path::absolute(socket).context("--firecracker")?,
            image: image.canonicalize().with_context(|| format!("--image {}", image.display()))?,
        },
        _ => Guest::Qemu,
    };
    let wish = StartVm {
        name: args.name,
        local_bytes: args.local.0,
        wanted,
        monitor,
        guest: Some(guest.clone()),
    };
    let pager = client.start_vm(wish)?;
    let needs = match guest {
        Guest::Firecracker { socket, .. } => Needs { name: &pager.name, library: None, socket },
        Guest::Qemu => {
            Needs { name: &pager.name, library: Some(library), socket: pager.socket.clone() }
        }
    };
    if args.json {
        println!("{}", serde_json::to_string(&needs)?);
    } else if let Some(library) = &needs.library {
        println!("{}={}", library::PRELOAD_VARIABLE, library.display());
        println!("{SOCKET_VARIABLE}={}", needs.socket.display());
    } else {
        println!("{}", needs.socket.display());
    }
    // Until its machine has come, the pager waits for it; from then on it must not wait for
    // another when this one has ended.
    let launched = Arc::new(Launched::new(&client, pager.clone())?);
    thread::spawn({
        let (launched, socket) = (Arc::clone(&launched), client.socket().to_owned());
        move || {
            if has_come(&socket, &pager.name) {
                launched.over();
            }
        }
    });
    let end = launched.wait_end(client)?;
    if let Some(error) = end.error {
        bail!("the pager of `{}` failed: {error}", end.name);
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until a machine has handed its memory over; `false` if its pager ends before. While there
/// is no node, nothing is known of either.
fn has_come(node: &Path, name: &str) -> bool {
    loop {
        let report = NodeClient::connect(node).map_err(ClientError::from);
        if let Ok(report) = report.and_then(|mut node| node.status()) {
            let consumer = report.consumers.iter().find(|consumer| consumer.name == name);
            let Some(consumer) = consumer else { return false };
            let stats = consumer.stats.as_ref();
            // One that has come and gone since the last look has left its mark.
            if stats.is_some_and(|stats| stats.processes > 0 || stats.local_peak_bytes > 0) {
                return true;
            }
        }
        thread::sleep(INTERVAL);
    }
}
