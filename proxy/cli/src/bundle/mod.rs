//! `baton bundle FILE`: one file with this program and a model, for a machine without the internet. There: `tar xf FILE` and
//! `baton-bundle/install.sh`. With `--offer` the other machine fetches it over the local network.

mod offer;

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use baton_fetch as models;
use baton_model::gguf::Gguf;
use baton_proxy::serve::{CommandFailure, model_files};
use clap::Args;

use self::offer::FOLDER;
use super::terminal;

/// Options of `baton bundle`.
#[derive(Args)]
pub(super) struct BundleArgs {
    /// The file to write, a tar archive. It installs on machines of this system and kind of processor
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The model that goes along: a .gguf file, a catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub [default: none]
    #[arg(long, short, value_name = "PATH|NAME")]
    model: Option<String>,
    /// Then let machines of the local network fetch the file for half an hour, by the command that this prints
    #[arg(long, value_name = "HOST:PORT", num_args = 0..=1, require_equals = true, default_missing_value = offer::DEFAULT_LISTEN)]
    offer: Option<String>,
}

/// What the home folder gets, as in a tarball of a release.
const INSTALL: &str = include_str!("../../../../packaging/install.sh");

/// A file that goes along, and its place in the archive.
struct Bundled {
    name: String,
    mode: u32,
    path: PathBuf,
}

/// Fetches the model if it is not here, and writes the archive.
pub(super) async fn run(args: BundleArgs) -> Result<(), CommandFailure> {
    let mut files = program_files(&std::env::current_exe()?)?;
    if let Some(model) = &args.model {
        let path = models::pull(model, &model_files::pull_options()?).await?;
        if path.is_dir() {
            return Err(CommandFailure(format!("{} is a folder; a bundle takes GGUF files", path.display())));
        }
        for part in Gguf::open(&path)?.files.all() {
            let name = format!("models/{}", file_name(&part.path)?);
            files.push(Bundled { name, mode: 0o644, path: part.path.clone() });
        }
    }
    let needs = needed_there(&files);
    let file = args.file.clone();
    let n_bytes = tokio::task::spawn_blocking(move || write(&file, &files)).await??;
    let shown = args.file.display();
    terminal::print_line(format_args!(
        "{shown}, {} MB. On the other machine{needs}: tar xf {shown} && {FOLDER}/install.sh",
        n_bytes / 1_000_000
    ))?;
    match &args.offer {
        Some(listen) => offer::serve(&args.file, n_bytes, listen).await,
        None => Ok(()),
    }
}

/// What the other machine must have: libraries of the system, by the names of Debian's packages.
fn needed_there(files: &[Bundled]) -> &'static str {
    match files.iter().any(|file| file.name.ends_with(OPENMP)) {
        _ if cfg!(not(target_os = "linux")) => "",
        true => " (needs libstdc++6)",
        false => " (needs libstdc++6 and libgomp1)",
    }
}

/// The program, and its libraries where they lie beside it or where it is installed.
fn program_files(program: &Path) -> Result<Vec<Bundled>, CommandFailure> {
    let mut files = vec![Bundled { name: "bin/baton".into(), mode: 0o755, path: program.to_owned() }];
    let folder = program.parent().ok_or_else(|| CommandFailure("the program is in no folder".into()))?;
    // `lib` may be anybody's.
    let is_engine = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with("libllama");
    let has_engine = |folder: &PathBuf| fs::read_dir(folder).is_ok_and(|files| files.flatten().any(is_engine));
    let libraries = ["lib", "../lib/baton"].map(|name| folder.join(name)).into_iter().find(has_engine);
    for entry in libraries.map(fs::read_dir).transpose()?.into_iter().flatten() {
        let path = entry?.path();
        if path.is_file() {
            files.push(Bundled { name: format!("lib/baton/{}", file_name(&path)?), mode: 0o644, path });
        }
    }
    if files.len() > 1 {
        add_loaded(&mut files, &loaded_libraries());
    }
    // The same program makes the same archive.
    files.sort_by(|one, two| one.name.cmp(&two.name));
    Ok(files)
}

/// OpenMP's threads, which the libraries of llama.cpp need, find in their own folder, and a bare system lacks.
const OPENMP: &str = "libgomp.so.1";

/// Libraries that a package leaves to others: a package of the system to the system, the wheel with CUDA to NVIDIA's wheels. The libraries of
/// llama.cpp find it in their own folder, too.
const LEFT_TO_OTHERS: [&str; 4] = [OPENMP, "libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"];

/// Adds what the package leaves to others, from where this process has it.
fn add_loaded(files: &mut Vec<Bundled>, maps: &str) {
    for library in LEFT_TO_OTHERS {
        let name = format!("lib/baton/{library}");
        if files.iter().all(|file| file.name != name)
            && let Some(path) = mapped(maps, library)
        {
            files.push(Bundled { name, mode: 0o644, path });
        }
    }
}

/// The text of /proc/PID/maps with llama.cpp's libraries loaded; empty where there is no such file.
fn loaded_libraries() -> String {
    // Errors: there is no library for this processor, and then the program computes nothing here, either.
    #[cfg(feature = "dynamic-backends")]
    let _ = baton_engines::llama::devices::all();
    fs::read_to_string("/proc/self/maps").unwrap_or_default()
}

/// The file of a library in the text of /proc/PID/maps, whose lines end with a path (proc_pid_maps(5)). The file's name may go on
/// with a version.
fn mapped(maps: &str, library: &str) -> Option<PathBuf> {
    let paths = maps.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
    let is_it = |path: &&Path| file_name(path).is_ok_and(|name| name.starts_with(library));
    paths.filter(|path| path.is_file()).find(is_it).map(Path::to_owned)
}

fn file_name(path: &Path) -> Result<&str, CommandFailure> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.ok_or_else(|| CommandFailure(format!("{} has a name that is not UTF-8", path.display())))
}

/// Writes the archive, which gets its name when it is complete. Returns its length.
fn write(file: &Path, files: &[Bundled]) -> Result<u64, CommandFailure> {
    let failed = |error: io::Error| CommandFailure(format!("{} cannot be written: {error}", file.display()));
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let part = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    let mut out = BufWriter::new(part.as_file());
    append(&mut out, "install.sh", 0o755, INSTALL.len() as u64, INSTALL.as_bytes())?;
    for Bundled { name, mode, path } in files {
        let read = |error: io::Error| CommandFailure(format!("{} cannot be read: {error}", path.display()));
        let input = File::open(path).map_err(read)?;
        let n_bytes = input.metadata().map_err(read)?.len();
        append(&mut out, name, *mode, n_bytes, BufReader::new(input))?;
    }
    // An archive ends with two empty blocks.
    out.write_all(&[0; 2 * BLOCK]).and_then(|()| out.flush()).map_err(failed)?;
    drop(out);
    let n_bytes = part.as_file().metadata().map_err(failed)?.len();
    part.persist(file).map_err(|error| failed(error.error))?;
    Ok(n_bytes)
}

/// Header and contents of a file stand in blocks of this size.
const BLOCK: usize = 512;

/// Appends a file. Errors: it is shorter or longer than it was, or its name is too long.
fn append(out: &mut impl Write, name: &str, mode: u32, n_bytes: u64, input: impl Read) -> Result<(), CommandFailure> {
    let name = format!("{FOLDER}/{name}");
    out.write_all(&header(&name, mode, n_bytes)?)?;
    let copied = io::copy(&mut input.take(n_bytes.saturating_add(1)), out)?;
    if copied != n_bytes {
        return Err(CommandFailure(format!("{name} changed while it was bundled")));
    }
    let padding = (BLOCK as u64 - n_bytes % BLOCK as u64) % BLOCK as u64;
    Ok(out.write_all(&[0; BLOCK][..padding as usize])?)
}

/// A header of POSIX's ustar format (IEEE 1003.1, pax): the name, octal numbers, and a checksum. A size of 8 GiB or more is in base
/// 256, as GNU's and BSD's tar have it.
fn header(name: &str, mode: u32, n_bytes: u64) -> Result<[u8; BLOCK], CommandFailure> {
    let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
    if folder.len() > 155 || file.len() > 100 {
        return Err(CommandFailure(format!("{file} has a name of more than 100 bytes, which an archive cannot hold")));
    }
    let mut header = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, file.as_bytes());
    put(100, format!("{mode:07o}").as_bytes());
    // Nobody's in particular: whoever unpacks it owns it.
    put(108, b"0000000");
    put(116, b"0000000");
    match n_bytes < 1 << 33 {
        true => put(124, format!("{n_bytes:011o}").as_bytes()),
        false => {
            put(124, &[0x80]);
            put(128, &n_bytes.to_be_bytes());
        }
    }
    put(136, b"00000000000");
    // The checksum is taken with spaces in its own place.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    put(345, folder.as_bytes());
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_size_in_octal_or_in_base_256() {
        let small = header("baton-bundle/bin/baton", 0o755, 1_000).unwrap();
        assert_eq!(&small[124..135], b"00000001750");
        assert_eq!((&small[..6], &small[345..361]), (&b"baton\0"[..], &b"baton-bundle/bin"[..]));
        let large = header("m.gguf", 0o644, 9 << 30).unwrap();
        assert_eq!((large[124], &large[128..136]), (0x80, &(9u64 << 30).to_be_bytes()[..]));
        let sum: u32 = large.iter().map(|&b| u32::from(b)).sum::<u32>()
            - large[148..156].iter().map(|&b| u32::from(b)).sum::<u32>();
        let written = std::str::from_utf8(&large[148..154]).unwrap();
        assert_eq!(u32::from_str_radix(written, 8), Ok(sum + 8 * u32::from(b' ')));
        assert!(header(&"x".repeat(101), 0o644, 1).is_err());
    }

    #[test]
    fn a_bundle_carries_openmp_from_where_this_process_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let [library, removed] = ["a b/libgomp.so.1.0.0", "libgomp.so.1.0.0"].map(|name| folder.path().join(name));
        fs::create_dir(library.parent().unwrap()).unwrap();
        fs::write(&library, "").unwrap();
        let line = |path: &Path| format!("7f00-7f01 r-xp 00000000 08:01 42   {}\n", path.display());
        let maps = format!("7ffc-7ffd rw-p 00000000 00:00 0  [stack]\n{}{}", line(&removed), line(&library));
        assert_eq!(mapped(&maps, OPENMP), Some(library));
        assert_eq!(mapped(&maps, "libgomp.so.2"), None);
        let mut files = Vec::new();
        add_loaded(&mut files, &maps);
        assert_eq!(files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(), ["lib/baton/libgomp.so.1"]);

        let bundled = |name: &str| Bundled { name: name.into(), mode: 0o644, path: PathBuf::new() };
        if cfg!(target_os = "linux") {
            assert!(needed_there(&[bundled("bin/baton")]).contains("libgomp1"));
            assert!(!needed_there(&[bundled("bin/baton"), bundled("lib/baton/libgomp.so.1")]).contains("libgomp1"));
        }
    }

    #[test]
    fn a_bundle_of_the_wheel_with_cuda_carries_nvidias_libraries_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut maps = String::new();
        for library in &LEFT_TO_OTHERS[1..] {
            fs::write(folder.path().join(library), "").unwrap();
            maps += &format!("7f00-7f01 r-xp 00000000 08:01 42   {}\n", folder.path().join(library).display());
        }
        let own = Bundled { name: "lib/baton/libcudart.so.13".into(), mode: 0o644, path: "own".into() };
        let mut files = vec![own];
        add_loaded(&mut files, &maps);
        let names = files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>();
        assert_eq!(names, LEFT_TO_OTHERS[1..].iter().map(|library| format!("lib/baton/{library}")).collect::<Vec<_>>());
        assert_eq!(files[0].path, Path::new("own"));
    }

    #[test]
    fn a_file_that_shrinks_or_grows_is_no_whole_archive() {
        for n_bytes in [2, 4] {
            assert!(append(&mut Vec::new(), "m", 0o644, n_bytes, &b"abc"[..]).is_err());
        }
        let mut out = Vec::new();
        append(&mut out, "m", 0o644, 3, &b"abc"[..]).unwrap();
        assert_eq!(out.len(), 2 * BLOCK);
    }
}
