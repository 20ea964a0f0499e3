//! The process that renders a model's chat template for its engine. [`baton_model::template::apart`] does it.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use baton_model::template::apart;
use baton_process::parent;
use rustix::process::{Resource, getppid};

/// Memory of the process, bytes: a prompt of the greatest length several times. On macOS, which does not enforce it, only time is
/// limited.
const MAX_MEMORY: u64 = 512 << 20;

/// Processor time for a prompt, seconds. The longest known prompts take one.
const MAX_WORK_SECONDS: u64 = 3;

/// How often the parent is looked for: a template that runs reads no standard input, whose end else ends this process.
const PARENT_INTERVAL: Duration = Duration::from_secs(1);

/// Renders for the other end of standard input, a socket, until it closes. Errors: the socket's.
pub fn run() -> io::Result<()> {
    for (resource, most) in [(Resource::Data, MAX_MEMORY), (Resource::Core, 0)] {
        parent::limit(resource, most)?;
    }
    let parent_id = getppid();
    let watch = move || {
        while getppid() == parent_id {
            std::thread::sleep(PARENT_INTERVAL);
        }
        parent::end_at_once()
    };
    std::thread::Builder::new().name("parent".into()).spawn(watch)?;
    apart::serve(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?), || parent::limit_work(MAX_WORK_SECONDS))
}
