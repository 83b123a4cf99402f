//! `hecaton swap-keeper`: the swap of one program, from before it starts until the last that it
//! left behind has ended.
//!
//! The keeper is a process of its own, because swap must not stay when `hecaton run` is killed: the
//! kernel goes on swapping to it. That command writes a [`Wish`] to the keeper's standard input,
//! and reads a [`Word`] from its output. When the input ends, the command no longer needs the swap,
//! or is dead. The keeper then waits until the program's group is empty, and takes everything down.
//! A program whose command was killed thus keeps its memory, as one on userfaultfd does.
//!
//! The kernel swaps to the volume's block device where it has ublk. Elsewhere it swaps to a loop
//! device on the volume's file. That adds two queues, the loop device's and FUSE's, and each of
//! them allocates for a request.

use crate::cgroup::Cgroup;
use crate::run::signals::Signals;
use crate::swap_device::{Loop, SwapOn};
use crate::tools::{self, tool};
use anyhow::{Context as _, bail};
use hecaton_block::ublk;
use hecaton_node::socket::client::NodeClient;
use hecaton_node::socket::message::{CreateVolume, Export};
use hecaton_node::volumes::ExportAddress;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// Between two looks at the group, and two attempts to delete the volume.
const POLL: Duration = Duration::from_millis(50);

/// Before other swap that the host may have: what the group swaps goes here.
const PRIORITY: &str = "100";

/// Request of `hecaton run`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Wish {
    /// The node's control socket.
    pub(super) node: PathBuf,
    /// The volume to swap to.
    pub(super) volume: CreateVolume,
    /// Where it is to be a file, if the kernel has no block devices of volumes.
    pub(super) file: PathBuf,
    /// The name of the program's memory cgroup.
    pub(super) cgroup: String,
    /// Memory that the group may have on this host.
    pub(super) local_bytes: u64,
}

/// Answer of the keeper when all is in place, or why it is not.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Word {
    /// The group that the program is to enter.
    Ready(PathBuf),
    /// In one line.
    Failed(String),
}

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    // A signal to all of a terminal, or of a session that ends, is no reason to leave swap behind.
    let _signals = Signals::hold()?;
    let mut lines = io::stdin().lock().lines();
    let wish = lines.next().transpose()?.unwrap_or_default();
    let wish: Wish = serde_json::from_str(&wish)
        .context("this command is started by `hecaton run`, with a pipe from it")?;
    let swap = match Swap::set_up(wish) {
        Ok(swap) => swap,
        Err(error) => {
            // The command says it.
            println!("{}", serde_json::to_string(&Word::Failed(format!("{error:#}")))?);
            return Ok(ExitCode::FAILURE);
        }
    };
    println!("{}", serde_json::to_string(&Word::Ready(swap.cgroup.path().to_owned()))?);
    for _ in lines {}
    while swap.cgroup.is_in_use() {
        thread::sleep(POLL);
    }
    drop(swap);
    Ok(ExitCode::SUCCESS)
}

/// Swap in use, and whose it is. The parts go in the order of the fields.
struct Swap {
    cgroup: Cgroup,
    _on: SwapOn,
    _device: Device,
    _volume: Volume,
}

/// Device that the kernel swaps to.
enum Device {
    /// The volume's own, which goes with it.
    Volumes(String),
    /// On the volume's file.
    Loop(Loop),
}

impl Swap {
    fn set_up(wish: Wish) -> anyhow::Result<Swap> {
        for (program, package) in [("mkswap", "util-linux"), ("swapon", "mount")] {
            tools::require(program, package)?;
        }
        let volume = Volume::create(wish.node, wish.volume)?;
        let device = match volume.disk() {
            Ok(path) => Device::Volumes(path.to_string_lossy().into_owned()),
            Err(error) => {
                tracing::debug!(volume = volume.name, "swap on a loop device: {error:#}");
                volume.export(ExportAddress::Fuse(wish.file.clone()))?;
                // With a page cache in between, writing pages out would take memory.
                Device::Loop(Loop::direct(&wish.file.to_string_lossy())?)
            }
        };
        tool("mkswap", &[device.path()])?;
        let on = SwapOn::with(&["--priority", PRIORITY, "--discard=pages"], device.path())?;
        let cgroup = Cgroup::new(&wish.cgroup, wish.local_bytes)?;
        Ok(Swap { cgroup, _on: on, _device: device, _volume: volume })
    }
}

impl Device {
    fn path(&self) -> &str {
        match self {
            Device::Volumes(path) => path,
            Device::Loop(device) => device.path(),
        }
    }
}

/// The volume. It is deleted when this is dropped.
struct Volume {
    node: PathBuf,
    name: String,
}

impl Volume {
    fn create(node: PathBuf, wish: CreateVolume) -> anyhow::Result<Volume> {
        let name = wish.name.clone();
        connect(&node)?.create_volume(wish)?;
        Ok(Volume { node, name })
    }

    /// Has it a block device, where the kernel can do that.
    fn disk(&self) -> anyhow::Result<PathBuf> {
        ublk::check()?;
        match self.export(ExportAddress::Ublk(None))? {
            ExportAddress::Ublk(Some(number)) => Ok(ublk::disk::path(number)),
            other => bail!("the node exports a block device at {other}"),
        }
    }

    /// Has it served; returns where.
    fn export(&self, address: ExportAddress) -> anyhow::Result<ExportAddress> {
        let export = Export {
            volume: self.name.clone(),
            address,
            read_only: false,
            tls: None,
            insecure: false,
            uring: false,
        };
        Ok(connect(&self.node)?.export_volume(export)?)
    }
}

fn connect(node: &Path) -> anyhow::Result<NodeClient> {
    NodeClient::connect(node).context("the node does not answer")
}

impl Drop for Volume {
    fn drop(&mut self) {
        // A loop device lets go of its file a moment after it was told to.
        let deleted = tools::eventually_even_if_interrupted(|| {
            NodeClient::connect(&self.node)?.delete_volume(&self.name).map_err(anyhow::Error::from)
        });
        if let Err(error) = deleted {
            // Without its node, the volume's process ends as nobody uses it.
            tracing::warn!(volume = self.name, "{error:#}");
        }
    }
}
