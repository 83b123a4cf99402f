//! `hecaton manager`: the control plane of a real cluster.

use crate::cluster::check_url;
use crate::daemons::lifetime;
use crate::listen;
use crate::out;
use crate::terminal::failure::usage;
use crate::tls::TlsArgs;
use anyhow::Context as _;
use hecaton_manager::{Etcd, Keep, ManagerServer};
use hecaton_node::cluster::endpoints::check_urls;
use hecaton_pki::OutsideCredentials;
use serde_json::json;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// How long a manager that ends waits for a write to its disk that hangs. Nobody has been told that
/// the write has succeeded.
const LAST_WRITE: Duration = Duration::from_secs(3);

/// Arguments of `hecaton manager`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where it listens; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7070")]
    listen: SocketAddr,
    /// Keeps its registry in this directory; without it, in memory, and a manager that is started
    /// again knows what nodes and donors tell it
    #[arg(long, value_name = "DIR", conflicts_with = "etcd")]
    state: Option<PathBuf>,
    /// Keeps its registry in etcd, with which several managers take turns: one leads, and another
    /// one when that dies
    #[arg(long, value_name = "URL,...")]
    etcd: Option<String>,
    /// The directory with etcd's authority (ca.pem), and the certificate and key that etcd is to
    /// know this manager by (cert.pem, key.pem); for --etcd https://...
    #[arg(long, value_name = "DIR", requires = "etcd")]
    etcd_tls: Option<PathBuf>,
    /// Where nodes and commands reach this manager, for others to say while it leads [default: that
    /// of --listen]
    #[arg(long, value_name = "URL", requires = "etcd")]
    advertise: Option<String>,
    /// Takes an address that other hosts can reach without --tls-dir, though nothing is encrypted
    /// or authenticated then
    #[arg(long)]
    insecure: bool,
    #[command(flatten)]
    tls: TlsArgs,
    /// Prints one line of JSON when it listens
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let credentials = args.tls.for_manager()?;
    listen::check("--listen", args.listen, args.insecure || credentials.is_some())?;
    let keep = keep(args, credentials.is_some())?;
    let (runtime, mut signals) = lifetime::begin()?;
    let manager = runtime.block_on(ManagerServer::start(args.listen, keep, credentials))?;
    match args.json {
        true => out::announce(format_args!("{}", json!({ "manager": manager.url() }))),
        false => out::announce(format_args!(
            "The manager is at {}, which is the dashboard in a browser.\n    \
             hecaton node --manager {} --name NAME --lend SIZE    adds a node",
            manager.url(),
            manager.url()
        )),
    }
    runtime.block_on(signals.next());
    runtime.block_on(manager.stop());
    runtime.shutdown_timeout(LAST_WRITE);
    Ok(ExitCode::SUCCESS)
}

/// Where the registry is to be.
fn keep(args: &Args, has_tls: bool) -> anyhow::Result<Keep> {
    let Some(members) = &args.etcd else {
        return Ok(args.state.clone().map_or(Keep::InMemory, Keep::In));
    };
    if let Err(error) = check_urls(members, &["http", "https"]) {
        usage!("--etcd: {error}");
    }
    let credentials = etcd_credentials(members, args)?;
    let url = match &args.advertise {
        Some(url) => url.clone(),
        None if args.listen.ip().is_unspecified() || args.listen.port() == 0 => usage!(
            "with --etcd and --listen {}, say with --advertise URL where this manager is reached",
            args.listen
        ),
        None => format!("{}://{}", if has_tls { "https" } else { "http" }, args.listen),
    };
    check_url(&url, "--advertise")?;
    Ok(Keep::Etcd(Etcd::new(members, &url, credentials)))
}

/// Returns the credentials for etcd, if it speaks TLS.
fn etcd_credentials(members: &str, args: &Args) -> anyhow::Result<Option<Arc<OutsideCredentials>>> {
    match (members.starts_with("https://"), &args.etcd_tls) {
        (true, Some(dir)) => {
            let opened = OutsideCredentials::open(dir);
            let opened = opened.context("no certificates for etcd")?;
            return Ok(Some(Arc::new(opened)));
        }
        (true, None) => usage!(
            "--etcd {members}: name the directory with etcd's authority and a certificate for it with \
             --etcd-tls DIR"
        ),
        (false, Some(dir)) => usage!(
            "--etcd-tls {} is of no use with {members}, where nothing is encrypted: is it https?",
            dir.display()
        ),
        (false, None) => {}
    }
    let is_here = |url: &str| {
        let host = url.trim_start_matches("http://");
        ["127.0.0.1:", "[::1]:", "localhost:"].iter().any(|here| host.starts_with(here))
    };
    if let Some(far) = members.split(',').find(|url| !is_here(url))
        && !args.insecure
    {
        usage!(
            "--etcd: what is said to {far} is neither encrypted nor authenticated; use https with \
             --etcd-tls, or a member of this host, or add --insecure if the network is trusted"
        );
    }
    Ok(None)
}
