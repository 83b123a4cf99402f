//! `hecaton manager`: the control plane of a real cluster.

use crate::lifetime;
use crate::listen;
use hecaton_manager::ManagerServer;
use serde_json::json;
use std::net::SocketAddr;
use std::process::ExitCode;

/// Arguments of `hecaton manager`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where it listens; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7070")]
    listen: SocketAddr,
    /// Takes an address that other hosts can reach, though nothing is encrypted or authenticated
    #[arg(long)]
    insecure: bool,
    /// Prints one line of JSON when it listens
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    listen::check("--listen", args.listen, args.insecure)?;
    let (runtime, mut signals) = lifetime::begin()?;
    let manager = runtime.block_on(ManagerServer::start(args.listen))?;
    match args.json {
        true => println!("{}", json!({ "manager": manager.url() })),
        false => println!(
            "The manager is at {}.\n    \
             hecaton node --manager {} --name NAME --lend SIZE    adds a node",
            manager.url(),
            manager.url()
        ),
    }
    runtime.block_on(signals.next());
    runtime.block_on(manager.stop());
    Ok(ExitCode::SUCCESS)
}
