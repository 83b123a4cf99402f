//! A cluster with certificates, all of it on this machine: a manager, a node that borrows, and
//! nodes that lend, which know each other by an authority of the bench's own. `hecaton dev` has one
//! node, which borrows from itself.

use crate::bench::world::cluster::{Cluster, share, this_program};
use crate::bench::world::process::Guarded;
use anyhow::Context as _;
use hecaton_pki::{Authority, Identity, Role, Wish};
use serde::Deserialize;
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The node that borrows.
const BORROWER: &str = "borrower";

/// How long its certificates are good for: longer than any bench takes.
const DAYS: u32 = 2;

/// The processes; they end with it.
pub(crate) struct Certified {
    pub(crate) cluster: Cluster,
    // Dropped in this order: nodes, then the manager.
    _nodes: Vec<Guarded>,
    _manager: Guarded,
}

/// Line that the manager prints when it is ready.
#[derive(Deserialize)]
struct Ready {
    manager: String,
}

impl Certified {
    /// One with so many nodes that lend at least `bytes` between them, and all of its files in
    /// `dir`.
    pub(crate) fn start(donors: u32, bytes: u64, dir: &Path) -> anyhow::Result<Self> {
        let hecaton = this_program()?;
        let authority = Authority::init(&dir.join("pki"))?;
        let issue = |name: &str, role: Role| -> anyhow::Result<PathBuf> {
            let hosts = match role {
                Role::Manager => vec!["127.0.0.1".to_owned()],
                _ => Vec::new(),
            };
            let identity = Identity { name: name.to_owned(), role };
            Ok(authority.issue(&Wish { identity, hosts, days: DAYS, renew: false })?.dir)
        };
        let mut command = Command::new(&hecaton);
        command.args(["manager", "--json", "--listen", "127.0.0.1:0", "--tls-dir"]);
        command.arg(issue("manager", Role::Manager)?).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut manager = Guarded::spawn(&mut command)?;
        // Without that line it has told the reason itself.
        let ready = manager.lines()?.next()?.context("the manager does not come up")?;
        let Ready { manager: url } = serde_json::from_str(&ready)?;

        let node = |name: &str, lend: Option<u64>| {
            let runtime = dir.join(name);
            fs::create_dir_all(&runtime)
                .with_context(|| format!("cannot make {}", runtime.display()))?;
            let mut command = Command::new(&hecaton);
            command.args(["node", "--name", name, "--manager", &url, "--adopt-within", "0"]);
            command.arg("--tls-dir").arg(issue(name, Role::Node)?);
            if let Some(bytes) = lend {
                command.args(["--lend", &bytes.to_string()]);
            }
            command.env("XDG_RUNTIME_DIR", runtime);
            Guarded::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()))
        };
        let lends = share(bytes, donors);
        let lenders = (1..=donors).map(|number| node(&format!("lender-{number}"), Some(lends)));
        let mut nodes = lenders.collect::<anyhow::Result<Vec<_>>>()?;
        nodes.push(node(BORROWER, None)?);

        let variable = |name: &str, value: &Path| {
            let mut variable = OsString::from(name);
            variable.push("=");
            variable.push(value);
            variable
        };
        let mut prefix: Vec<_> = ["env", "-u", "HECATON_MANAGER"].map(OsString::from).into();
        prefix.push(variable("XDG_RUNTIME_DIR", &dir.join(BORROWER)));
        prefix.push(variable("HECATON_TLS", &issue("bench", Role::Admin)?));
        let cluster = Cluster::of(url, prefix)?;
        cluster.wait_for_donors(donors as usize)?;
        cluster.wait_until_told(BORROWER)?;
        Ok(Self { cluster, _nodes: nodes, _manager: manager })
    }
}
