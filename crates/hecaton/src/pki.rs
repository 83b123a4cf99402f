//! `hecaton pki`: a certificate authority of the cluster's own.

use crate::daemons::lifetime;
use crate::out;
use crate::terminal::failure::usage;
use anyhow::Context as _;
use hecaton_node::cluster::report::check_name;
use hecaton_pki::{Authority, Identity, Reception, Role, TokenWish, Wish, is_host_and_port};
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

/// Certificates for a cluster.
#[derive(clap::Subcommand)]
pub(crate) enum Pki {
    /// Makes an authority
    Init(InitArgs),
    /// Issues a certificate, into a directory for --tls-dir
    Issue(IssueArgs),
    /// Revokes all certificates of a name
    Revoke(RevokeArgs),
    /// Gives out a token, with which a host gets a node's certificate from `hecaton pki serve`
    Token(TokenArgs),
    /// Signs certificates for those who have a token, over the network; run it where the authority
    /// is, while nodes join
    Serve(ServeArgs),
}

#[derive(clap::Args)]
pub(crate) struct InitArgs {
    /// The authority's directory; whoever can read it can be anybody in the cluster
    #[arg(long, value_name = "DIR", default_value = "pki")]
    dir: PathBuf,
}

#[derive(clap::Args)]
pub(crate) struct IssueArgs {
    /// Owner of the certificate: a node's name in the cluster, or any name
    name: String,
    /// Rights of its owner. manager: serve the control plane; node: lend and borrow under that
    /// name; admin: look and give orders; read-only: look, and read volumes; export: serve volumes
    /// to other hosts; client: use volumes
    #[arg(long, default_value = "node", value_parser = |text: &str| text.parse::<Role>())]
    role: Role,
    /// Where a manager, or one that serves volumes, is reached, a name or an address; can be given
    /// several times
    #[arg(long = "host", value_name = "HOST")]
    hosts: Vec<String>,
    /// How long it is good for
    #[arg(long, value_name = "DAYS", default_value_t = 365)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
    /// Makes a new key and certificate in the place of those there are, which stay good until they
    /// end; what runs takes the new ones up without a restart
    #[arg(long)]
    renew: bool,
    /// The authority's directory
    #[arg(long, value_name = "DIR", default_value = "pki")]
    dir: PathBuf,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub(crate) struct RevokeArgs {
    /// Owner of the certificates
    name: String,
    /// The authority's directory
    #[arg(long, value_name = "DIR", default_value = "pki")]
    dir: PathBuf,
}

#[derive(clap::Args)]
pub(crate) struct TokenArgs {
    /// Where `hecaton pki serve` is reached
    #[arg(long, value_name = "HOST:PORT", required_unless_present = "withdraw_all")]
    at: Option<String>,
    /// The only node that may use it; also in the place of a certificate that it has. Without it,
    /// any node may whose name has none
    #[arg(long)]
    name: Option<String>,
    /// How many nodes may use it
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "name")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    uses: u32,
    /// How long it is good
    #[arg(long, value_name = "HOURS", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=720))]
    hours: u32,
    /// Withdraws all tokens that were given out, and gives out none
    #[arg(long, conflicts_with_all = ["at", "name", "uses", "hours", "json"])]
    withdraw_all: bool,
    /// The authority's directory
    #[arg(long, value_name = "DIR", default_value = "pki")]
    dir: PathBuf,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub(crate) struct ServeArgs {
    /// Where it listens; port 0 takes a free one. A node that joins must show a token; it sends
    /// nothing before this authority has shown its certificate
    #[arg(long, value_name = "ADDRESS")]
    listen: SocketAddr,
    /// How long the certificates are good for
    #[arg(long, value_name = "DAYS", default_value_t = 365)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
    /// The authority's directory
    #[arg(long, value_name = "DIR", default_value = "pki")]
    dir: PathBuf,
    /// Prints one line of JSON when it listens
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(pki: &Pki) -> anyhow::Result<ExitCode> {
    match pki {
        Pki::Init(args) => init(args)?,
        Pki::Issue(args) => issue(args)?,
        Pki::Revoke(args) => revoke(args)?,
        Pki::Token(args) => token(args)?,
        Pki::Serve(args) => serve(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn init(args: &InitArgs) -> anyhow::Result<()> {
    Authority::init(&args.dir)?;
    let dir = args.dir.display();
    println!(
        "The authority is in {dir}: keep it where nobody else can read it.\n    \
         hecaton pki issue manager --role manager --host HOST --dir {dir}\n    \
         hecaton pki issue NODE --dir {dir}\n    \
         hecaton pki issue NAME --role admin|read-only|client --dir {dir}"
    );
    Ok(())
}

fn issue(args: &IssueArgs) -> anyhow::Result<()> {
    if let Err(error) = check_name(&args.name) {
        usage!("{error}");
    }
    match (args.role, args.hosts.is_empty()) {
        (Role::Manager, true) => usage!(
            "a manager needs a --host: what stands in the URL by which nodes and commands reach it"
        ),
        (Role::Export, true) => {
            usage!(
                "who serves volumes needs a --host: what stands in the URI by which clients reach it"
            )
        }
        (role @ (Role::Node | Role::Admin | Role::ReadOnly | Role::Client), false) => {
            usage!("--host {} is for managers and exports, not for role {role}", args.hosts[0])
        }
        _ => {}
    }
    let issued = Authority::open(&args.dir)?.issue(&Wish {
        identity: Identity { name: args.name.clone(), role: args.role },
        hosts: args.hosts.clone(),
        days: args.days,
        renew: args.renew,
    })?;
    match args.json {
        true => println!("{}", json!({ "dir": issued.dir, "ends_unix_s": issued.ends_unix_s })),
        false => {
            let option = match args.role {
                Role::Export => "`hecaton volume export --tls DIR`",
                Role::Client => "tls-certificates=DIR, or as QEMU's tls-creds-x509",
                Role::Manager | Role::Node | Role::Admin | Role::ReadOnly => "--tls-dir",
            };
            println!(
                "{} is for {} `{}`, for {} days: copy it there, and name it with {option}.",
                issued.dir.display(),
                args.role,
                args.name,
                args.days
            );
        }
    }
    Ok(())
}

fn revoke(args: &RevokeArgs) -> anyhow::Result<()> {
    let authority = Authority::open(&args.dir)?;
    let count = authority.revoke(&args.name)?;
    println!(
        "Revoked {count} certificate(s) of `{}`. Copy {} into the manager's --tls-dir, and after a \
         manager was revoked into everybody's: it counts from then on, without a restart.",
        args.name,
        authority.crl_file().display()
    );
    Ok(())
}

fn token(args: &TokenArgs) -> anyhow::Result<()> {
    if args.withdraw_all {
        let count = Authority::open(&args.dir)?.withdraw_tokens()?;
        println!("Withdrew {count} token(s); certificates that were had with them stay good.");
        return Ok(());
    }
    let at = args.at.as_deref().unwrap_or_default();
    if !is_host_and_port(at) {
        usage!("--at `{at}` is no HOST:PORT: write where `hecaton pki serve` is reached");
    }
    if let Some(Err(error)) = args.name.as_deref().map(check_name) {
        usage!("--name: {error}");
    }
    let token = Authority::open(&args.dir)?.grant(&TokenWish {
        at: at.to_owned(),
        name: args.name.clone(),
        uses: args.uses,
        hours: args.hours,
    })?;
    match args.json {
        true => println!("{}", json!({ "token": token.to_string() })),
        // Nothing else, for it to go into a file.
        false => println!("{token}"),
    }
    Ok(())
}

fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let reception = Reception::open(&args.dir, args.days)?;
    let listener = TcpListener::bind(args.listen)
        .with_context(|| format!("cannot listen on --listen {}", args.listen))?;
    let address = listener.local_addr()?;
    let (runtime, mut signals) = lifetime::begin()?;
    thread::Builder::new().name("reception".into()).spawn(move || reception.serve(&listener))?;
    match args.json {
        true => out::announce(format_args!("{}", json!({ "authority": address.to_string() }))),
        false => out::announce(format_args!(
            "Nodes are taken in at {address}.\n    hecaton pki token --at HOST:{} --dir {}    gives \
             out a token, for `hecaton node --join FILE`",
            address.port(),
            args.dir.display()
        )),
    }
    runtime.block_on(signals.next());
    Ok(())
}
