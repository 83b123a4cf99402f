//! `hecaton vm libvirt`: changes the XML of a libvirt domain, so that `virsh start` starts it on
//! pool memory, or as a harvest VM, from then on; or changes it back.
//!
//! Uses `virsh`, so that it links nothing of libvirt and works with any connection that virsh
//! knows. Shows the changes first, and makes them only after consent.

use crate::cluster::ClusterArgs;
use crate::placement::{PoolArgs, RangeArgs};
use crate::run::library;
use crate::terminal::failure::usage;
use anyhow::{Context as _, bail};
use hecaton_memory::Size;
use hecaton_node::NodePaths;
use hecaton_node::cluster::report::check_name;
use hecaton_node::socket::message::{Request, StartVm};
use hecaton_uffd::handover::{NODE_VARIABLE, REQUEST_VARIABLE};
use hecaton_vm::create::check_sizes;
use hecaton_vm::domain::{self, DomainError, Wish};
use std::io::{BufRead, IsTerminal, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Output};

/// Arguments of `hecaton vm libvirt`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The domain
    domain: String,
    /// The part of its memory that stays on this host
    #[arg(long, value_name = "SIZE", required_unless_present_any = ["remove", "harvest"])]
    local: Option<Size>,
    /// Makes it a harvest VM, which has its minimum, and up to its maximum what nobody else on its
    /// host needs, as the agent of `hecaton node --libvirt` says
    #[arg(long, requires_all = ["min", "max"], conflicts_with_all = ["local", "name", "PoolArgs", "RangeArgs"])]
    harvest: bool,
    /// The memory that a harvest VM has as long as it runs
    #[arg(long, value_name = "SIZE", requires = "harvest")]
    min: Option<Size>,
    /// The most memory that a harvest VM has
    #[arg(long, value_name = "SIZE", requires = "harvest")]
    max: Option<Size>,
    /// Sets the domain back to what it was
    #[arg(long, conflicts_with_all = ["local", "harvest"])]
    remove: bool,
    /// The machine's name in the cluster [default: the domain's]
    #[arg(long)]
    name: Option<String>,
    /// libvirt's connection, as virsh knows it
    #[arg(long, value_name = "URI")]
    connect: Option<String>,
    /// Shows what would be changed, and changes nothing
    #[arg(long, conflicts_with = "yes")]
    diff: bool,
    /// Changes the domain without asking
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    pool: PoolArgs,
    #[command(flatten)]
    ranges: RangeArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let before = dump(args)?;
    let after = match (args.local, args.min, args.max) {
        (Some(local), ..) => {
            crate::run::check_local(local.0)?;
            changed(args, local, &before)?
        }
        (None, Some(min), Some(max)) => harvest(args, min, max, &before)?,
        (None, ..) => restored(&before)
            .with_context(|| format!("the domain `{}` stays as it is", args.domain))?,
    };
    if before == after {
        println!("the domain `{}` is set up so already", args.domain);
        return Ok(ExitCode::SUCCESS);
    }
    print!("{}", domain::diff(&args.domain, &before, &after));
    if args.diff {
        return Ok(ExitCode::SUCCESS);
    }
    if !args.yes && !agreed(&args.domain)? {
        println!("nothing was changed");
        return Ok(ExitCode::FAILURE);
    }
    define(args, &after)?;
    println!("the domain `{}` is changed; it takes effect at its next start", args.domain);
    if args.harvest {
        println!("{}", domain::harvest::ADVICE);
    }
    Ok(ExitCode::SUCCESS)
}

fn changed(args: &Args, local: Size, before: &str) -> anyhow::Result<String> {
    let name = args.name.as_ref().unwrap_or(&args.domain).clone();
    if let Err(error) = check_name(&name) {
        usage!("{error}; name the machine with --name");
    }
    let wanted = args.pool.check_with(&args.ranges)?;
    let library = library::find()?;
    // The node that is there; if none is, the one that will be in this directory.
    let socket = match args.cluster.local_node()? {
        Some(mut client) => client.status()?.control_socket,
        None => NodePaths::new(std::path::absolute(args.cluster.dir())?).control_socket(),
    };
    let dir = socket.parent().unwrap_or(Path::new("/"));
    let monitor = NodePaths::new(dir).monitor_socket(&name)?;
    let request = Request::StartVm(StartVm {
        name,
        local_bytes: local.0,
        wanted,
        monitor: Some(monitor.clone()),
        guest: None,
    });
    let variables = [
        (NODE_VARIABLE, socket.display().to_string()),
        (REQUEST_VARIABLE, serde_json::to_string(&request)?),
    ];
    let wish = Wish { library: &library, monitor: &monitor, variables: &variables };
    domain::edit(before, wish)
        .with_context(|| format!("the domain `{}` cannot run on pool memory", args.domain))
}

/// Whichever of the two it was made.
fn restored(before: &str) -> Result<String, DomainError> {
    match domain::restore(before) {
        Err(DomainError::NotOurs) => domain::harvest::restore(before),
        restored => restored,
    }
}

fn harvest(args: &Args, min: Size, max: Size, before: &str) -> anyhow::Result<String> {
    if let Err(error) = check_sizes(min.0, max.0) {
        usage!("{error}");
    }
    if min == max {
        usage!(
            "a harvest VM that has {min} at least and at most never grows; give more with --max"
        );
    }
    if domain::restore(before).is_ok() {
        bail!(
            "the domain `{}` is set up for pool memory, and memory is harvested on its own host; take that away with --remove first",
            args.domain
        );
    }
    domain::harvest::make(before, min.0, max.0)
        .with_context(|| format!("the domain `{}` cannot be made a harvest VM", args.domain))
}

fn agreed(domain: &str) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("nothing was changed; agree with --yes");
    }
    print!("Change the domain `{domain}` so? [y/N] ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn dump(args: &Args) -> anyhow::Result<String> {
    let output =
        virsh(args, &["dumpxml", "--inactive", "--security-info", "--domain", &args.domain])?;
    String::from_utf8(output.stdout).context("virsh gave something that is no text")
}

fn define(args: &Args, xml: &str) -> anyhow::Result<()> {
    let mut file = tempfile::Builder::new().prefix("hecaton-domain-").suffix(".xml").tempfile()?;
    file.write_all(xml.as_bytes())?;
    let path = file.path().to_str().context("the temporary directory's name is no text")?;
    virsh(args, &["define", "--file", path])?;
    Ok(())
}

fn virsh(args: &Args, words: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new("virsh");
    command.env("LC_ALL", "C").arg("--quiet");
    if let Some(uri) = &args.connect {
        command.args(["--connect", uri]);
    }
    let output = command.args(words).output().context(
        "cannot run virsh, which is libvirt's command; install libvirt-clients, or its like",
    )?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("virsh {}: {}", words[0], reason.trim().trim_start_matches("error: "));
    }
    Ok(output)
}
