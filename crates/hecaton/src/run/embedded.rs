//! The cluster that `hecaton run` starts when there is none.
//!
//! It is a process of its own and not a part of this one: if this command is killed, the program
//! still has its memory, and the cluster ends when the program has.

use crate::daemons::dev::Ready;
use crate::daemons::lending::{self, MIN_LEND_BYTES};
use anyhow::{Context as _, bail};
use hecaton_memory::Size;
use hecaton_node::NodePaths;
use hecaton_node::cluster::report::Host;
use hecaton_node::socket::client::NodeClient;
use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long the cluster may take to end.
const CLUSTER_PATIENCE: Duration = Duration::from_secs(30);

/// Two, so that one can be lost in experiments.
const DONORS: u16 = 2;

/// A running cluster. Dropping it waits for its end, which comes when nothing uses it.
pub(super) struct Embedded {
    process: Child,
    dir: PathBuf,
    leave: bool,
}

impl Embedded {
    /// Starts a cluster whose donors lend `lend` each.
    pub(super) fn start(lend: Option<Size>) -> anyhow::Result<Embedded> {
        let host = Host::here().context("cannot read /proc")?;
        let lend = match lend {
            Some(lend) => {
                lending::check_total(lend, DONORS, &host)?;
                lend
            }
            None => Size((host.available_bytes / 2).max(MIN_LEND_BYTES)),
        };
        let dir = dir();
        let program = env::current_exe().context("cannot tell where the hecaton command is")?;
        let mut process = Command::new(program)
            .args(["dev", "--json", "--follow-stdin", "--donors", &DONORS.to_string()])
            .args(["--lend", &lend.0.to_string()])
            .arg("--dir")
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The terminal's signals are the program's affair.
            .process_group(0)
            .spawn()
            .context("cannot start a cluster for the program")?;
        let mut output = BufReader::new(process.stdout.take().expect("its output is a pipe"));
        let mut line = String::new();
        let read = output.read_line(&mut line);
        let embedded = Embedded { process, dir, leave: false };
        read.context("cannot start a cluster for the program")?;
        if serde_json::from_str::<Ready>(&line).is_err() {
            // Its own words are on standard error already.
            bail!("the cluster for the program does not start");
        }
        Ok(embedded)
    }

    /// Connects to its node.
    pub(super) fn connect(&self) -> anyhow::Result<NodeClient> {
        NodeClient::connect(&NodePaths::new(&self.dir).control_socket())
            .context("the cluster for the program does not answer")
    }

    /// The process that is waited for when this is dropped.
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Leaves the cluster to what still uses it.
    pub(super) fn leave(&mut self) {
        self.leave = true;
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        // Its standard input is what it follows.
        drop(self.process.stdin.take());
        let deadline = Instant::now() + CLUSTER_PATIENCE;
        while !self.leave && Instant::now() < deadline {
            if !matches!(self.process.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A directory that no other cluster has.
pub(super) fn dir() -> PathBuf {
    let mut name: OsString = NodePaths::default_dir().into();
    name.push(format!("-run-{}", std::process::id()));
    name.into()
}
