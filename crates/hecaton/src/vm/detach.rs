//! `hecaton vm detach`: a machine leaves the pool and runs on.

use crate::cluster::ClusterArgs;
use anyhow::bail;
use hecaton_node::vms::VmState;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// How often it is looked whether all is home.
const INTERVAL: Duration = Duration::from_millis(200);

/// Arguments of `hecaton vm detach`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The machine
    name: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut client = args.cluster.need_local_node()?;
    client.detach(&args.name)?;
    loop {
        let report = client.status()?;
        let Some(vm) = report.vms.iter().find(|vm| vm.name == args.name) else {
            bail!("the machine `{}` ended before all of its memory was home", args.name);
        };
        match vm.state {
            VmState::Detached => break,
            VmState::Leaving => {}
            _ => bail!(
                "the machine `{}` was stopped: {}",
                args.name,
                vm.reason.as_deref().unwrap_or("its memory did not come home")
            ),
        }
        thread::sleep(INTERVAL);
    }
    println!("the memory of `{}` is on this host, and stays there", args.name);
    Ok(ExitCode::SUCCESS)
}
