//! `hecaton node recall`: a donor lends less from now on, and gets back what it has lent above
//! that.
//!
//! The manager tells the donor its limit; the donor tells each of its borrowers how many extents it
//! wants back, and they choose which, and move them to other donors. This command only looks on.

use crate::nodes::giving_back::{self, WatchArgs};
use crate::terminal::failure::usage;
use anyhow::bail;
use hecaton_memory::Size;
use hecaton_node::donors::DonorReport;
use std::process::ExitCode;

/// Arguments of `hecaton node recall`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Most memory that it lends from now on
    #[arg(long, value_name = "SIZE", required_unless_present = "cancel")]
    to: Option<Size>,
    /// Has the donor lend again all that it has; what has moved stays where it is
    #[arg(long, conflicts_with = "to")]
    cancel: bool,
    #[command(flatten)]
    watch: WatchArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let WatchArgs { name, json, cluster, .. } = &args.watch;
    let manager = cluster.need_manager()?;
    let Some(to) = args.to else {
        manager.limit(name, None)?;
        return Ok(ExitCode::SUCCESS);
    };
    let status = manager.status()?;
    let mut donors = status.nodes.iter().flat_map(|node| &node.report.donors);
    if let Some(donor) = donors.find(|donor| donor.name == *name && donor.lend_bytes <= to.0) {
        let all = Size(donor.lend_bytes);
        usage!(
            "--to {to} takes nothing back from {name}, which lends {all}; --cancel lifts a limit"
        );
    }
    manager.limit(name, Some(to))?;
    let left = |donor: &DonorReport| above(donor, to);
    let outcome = giving_back::watch(&manager, &args.watch, left)?;
    if *json {
        println!("{}", serde_json::to_string(&outcome)?);
    } else if outcome.left_bytes == 0 {
        let how = match outcome.parked_bytes {
            0 => format!("lends {to} at most"),
            parked => format!("has {to} at most in memory and {} parked", Size(parked)),
        };
        println!("{name} {how} ({:.1} s)", outcome.elapsed_s);
    }
    if outcome.left_bytes > 0 {
        let parking = match &outcome.trouble {
            Some(trouble) => format!(" It cannot park them: {trouble}."),
            None => String::new(),
        };
        bail!(
            "{} above the {to} that {name} is to lend are still with it: is there room at other \
             donors?{parking} It goes on asking for them; `hecaton node recall {name} --cancel` has \
             it lend all of its memory again",
            Size(outcome.left_bytes),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes that the host is to have back; `None` as long as the donor has not said that it was told.
fn above(donor: &DonorReport, to: Size) -> Option<u64> {
    let stats = donor.stats.as_ref().filter(|stats| stats.told_limit_bytes == Some(to.0))?;
    Some(stats.in_use_bytes().saturating_sub(to.0))
}
