//! `hecaton vm admit`: has a domain that libvirt is about to start wait until this host's agent has
//! room for it.
//!
//! libvirt runs a script, `/etc/libvirt/hooks/qemu`, before it starts QEMU, waits for its end, and
//! starts nothing if it fails. The domain's XML is its input. It must not ask libvirt anything,
//! which holds the domain meanwhile, and so does not.

use super::create::wait_for_memory;
use crate::cluster::ClusterArgs;
use anyhow::{Context as _, bail};
use hecaton_broker::NewcomerKind;
use hecaton_node::socket::message::CreateVm;
use hecaton_vm::domain::MAX_DOMAIN_BYTES;
use hecaton_vm::domain::harvest::Domain;
use std::env;
use std::io::{Read as _, stdin};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Before a domain is started, and only then: also when it is restored, or comes from another host.
const OPERATION: &str = "prepare";

/// Arguments of `hecaton vm admit`: those that libvirt gives its hook.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long the domain may wait; when that is over, libvirt does not start it
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    within: u64,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The domain's name
    domain: String,
    /// The operation of libvirt; only `prepare` waits
    operation: String,
    /// libvirt's further words
    words: Vec<String>,
}

/// Arguments of `hecaton vm libvirt-hook`.
#[derive(clap::Args)]
pub(crate) struct HookArgs {
    /// How long a domain may wait
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    within: u64,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn print_hook(args: &HookArgs) -> anyhow::Result<ExitCode> {
    let program = env::current_exe().context("this program cannot be found")?;
    let dir = std::path::absolute(args.cluster.dir())?;
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let [program, dir] = [program, dir].map(|path| path.to_str().map(quoted));
    let text = "a directory's name is no text";
    println!(
        "#!/bin/sh\n# From `hecaton vm libvirt-hook`: domains start once this host's agent has room for them.\n\
         exec {} vm admit --within {} --dir {} -- \"$@\"",
        program.context(text)?,
        args.within,
        dir.context(text)?
    );
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut xml = String::new();
    // Also where it is not needed: libvirt writes it.
    stdin().take(MAX_DOMAIN_BYTES as u64 + 1).read_to_string(&mut xml)?;
    if args.operation != OPERATION {
        return Ok(ExitCode::SUCCESS);
    }
    let name = args.domain.clone();
    let domain =
        Domain::read(&xml).with_context(|| format!("the domain `{name}` cannot be read"))?;
    let client = match args.cluster.need_local_node() {
        Ok(client) => client,
        Err(error) => {
            // The host's machines do not depend on its agent: it counts the domain when it sees it.
            eprintln!("hecaton: the domain `{name}` starts without being admitted: {error:#}");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let wish = wish(domain);
    let (answer, answered) = mpsc::channel();
    thread::spawn(move || answer.send(wait_for_memory(client, &wish).map(drop)));
    match answered.recv_timeout(Duration::from_secs(args.within)) {
        Ok(admitted) => admitted.with_context(|| format!("the domain `{name}` is not admitted"))?,
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => bail!(
            "the domain `{name}` was not admitted within {} s, for this host has no room for it; `hecaton host status` says who has \
             what; start it again later, or give it more time with --within",
            args.within
        ),
    }
    Ok(ExitCode::SUCCESS)
}

fn wish(domain: Domain) -> CreateVm {
    let kind = match domain.harvest {
        Some(_) => NewcomerKind::Harvest,
        None => NewcomerKind::Regular,
    };
    CreateVm {
        kind,
        bytes: domain.base_bytes,
        max_bytes: domain.max_bytes(),
        name: domain.name,
        numa_node: domain.host_node,
        cores: 0,
        balloon: false,
        container: false,
        domain: Some(domain.uuid),
    }
}
