//! `hecaton guest`: the harvesting manager inside a harvest VM.

use crate::daemons::lifetime;
use crate::out;
use crate::terminal::failure::usage;
use anyhow::Context as _;
use hecaton_guest::{Address, ApiServer, Config, ConfigError, Manager, kernel_memory};
use hecaton_vm::guest_port::PORT_NAME;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Where the kernel of a guest has the ports that its host has given it.
const PORTS: &str = "/dev/virtio-ports";

/// Arguments of `hecaton guest`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The file of the applications, and of what is left to everything else; see docs/harvesting.md
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The virtio-serial port, or Unix socket, through which the host tells what will come
    /// [default: /dev/virtio-ports/org.hecaton.guest.0 if it is there; without one only the memory
    /// is watched]
    #[arg(long, value_name = "DEVICE")]
    port: Option<PathBuf>,
    /// Serves the HTTP API there: unix:/PATH, for its owner and group, or a loopback address such
    /// as 127.0.0.1:7072, for everybody in the guest; can be given several times
    #[arg(long, value_name = "ADDRESS")]
    serve: Vec<Address>,
    /// Prints one line of JSON when it runs
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let config = match Config::read(&args.config) {
        Ok(config) => config,
        Err(error @ ConfigError::Read { .. }) => return Err(error).context("--config"),
        Err(error) => usage!("--config: {error}"),
    };
    for address in &args.serve {
        if let Err(error) = ApiServer::check(address) {
            usage!("--serve: {error}");
        }
    }
    let usual = Path::new(PORTS).join(PORT_NAME);
    let port = args.port.or_else(|| usual.exists().then_some(usual));
    kernel_memory().context("cannot watch the memory")?;
    let (runtime, mut signals) = lifetime::begin()?;
    let manager = Manager::start(config, port.clone(), kernel_memory);
    let manager = manager.context("cannot start threads")?;
    let servers = match runtime.block_on(serve(&args.serve, &manager)) {
        Ok(servers) => servers,
        Err(error) => {
            manager.stop();
            return Err(error);
        }
    };
    let addresses: Vec<String> =
        servers.iter().map(|server| server.address().to_string()).collect();
    match args.json {
        true => out::announce(format_args!("{}", json!({ "port": port, "serves": addresses }))),
        false => {
            let hears = match &port {
                Some(port) => format!("Listens for the host at {}.", port.display()),
                None => "There is no port to the host: only the memory is watched.".to_owned(),
            };
            let serves: String =
                addresses.iter().map(|address| format!("\nThe API is at {address}.")).collect();
            out::announce(format_args!("{hears}{serves}"));
        }
    }
    runtime.block_on(signals.next());
    for server in servers {
        runtime.block_on(server.stop());
    }
    manager.stop();
    Ok(ExitCode::SUCCESS)
}

async fn serve(addresses: &[Address], manager: &Manager) -> anyhow::Result<Vec<ApiServer>> {
    let mut servers = Vec::new();
    for address in addresses {
        let server = ApiServer::start(address, manager.router()).await;
        servers.push(server.context("--serve")?);
    }
    Ok(servers)
}
