//! `hecaton node drain`: a donor gives back all that it has lent, while its borrowers run.
//!
//! The manager has it drain; it lends nothing more, and tells each of its borrowers so with its
//! answers; they move what they have there to other donors. This command only looks on.

use crate::nodes::giving_back::{self, WatchArgs};
use anyhow::bail;
use hecaton_memory::{Size, pages_to_bytes};
use hecaton_node::donors::DonorReport;
use std::process::ExitCode;

/// Arguments of `hecaton node drain`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Has the donor lend again; what has moved stays where it is
    #[arg(long)]
    cancel: bool,
    #[command(flatten)]
    watch: WatchArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let WatchArgs { name, json, cluster, .. } = &args.watch;
    let manager = cluster.need_manager()?;
    manager.drain(name, !args.cancel)?;
    if args.cancel {
        return Ok(ExitCode::SUCCESS);
    }
    let outcome = giving_back::watch(&manager, &args.watch, lent_bytes)?;
    if *json {
        println!("{}", serde_json::to_string(&outcome)?);
    } else if outcome.left_bytes == 0 {
        let elapsed_s = outcome.elapsed_s;
        println!("{name} holds nothing of anybody and can be switched off ({elapsed_s:.1} s)");
    }
    if outcome.left_bytes > 0 {
        bail!(
            "{} of others' memory are still with {name}: is there room at other donors? It goes on \
             draining; `hecaton node drain {name} --cancel` has it lend again",
            Size(outcome.left_bytes),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes that borrowers have there; `None` as long as it has not said that it drains.
fn lent_bytes(donor: &DonorReport) -> Option<u64> {
    let stats = donor.stats.as_ref().filter(|stats| stats.draining)?;
    Some(pages_to_bytes(stats.lent_pages + stats.leaving_pages))
}
