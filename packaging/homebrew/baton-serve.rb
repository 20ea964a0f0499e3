# scripts/package/formula.sh fills in the version, the address and the checksums of a release.
class BatonServe < Formula
  desc "OpenAI- and Ollama-compatible endpoint for language models on your own machines"
  homepage "@URL@"
  version "@VERSION@"
  license "Apache-2.0"

  on_macos do
    depends_on arch: :arm64
    # As MACOSX_DEPLOYMENT_TARGET in the Makefile.
    depends_on macos: :sonoma
    url "@URL@/baton-@VERSION@-macos-arm64.tar.gz"
    sha256 "@SUM_macos-arm64@"
  end

  on_linux do
    on_intel do
      url "@URL@/baton-@VERSION@-linux-x86_64.tar.gz"
      sha256 "@SUM_linux-x86_64@"
    end
    on_arm do
      url "@URL@/baton-@VERSION@-linux-aarch64.tar.gz"
      sha256 "@SUM_linux-aarch64@"
    end
  end

  def install
    bin.install "bin/baton"
    # The program looks for its libraries in ../lib/baton.
    (lib/"baton").install Dir["lib/baton/*"] if Dir.exist? "lib/baton"
    man1.install Dir["share/man/man1/*"]
    bash_completion.install "share/bash-completion/completions/baton"
    zsh_completion.install "share/zsh/site-functions/_baton"
    fish_completion.install "share/fish/vendor_completions.d/baton.fish"
    pkgshare.install Dir["share/baton/*"]
    (etc/"baton").mkpath
    (var/"log").mkpath
    cp pkgshare/"configs/single-machine.toml", etc/"baton/baton.toml" unless (etc/"baton/baton.toml").exist?
  end

  service do
    # Baton keeps its log bounded. The paths below take what comes before it runs.
    run [opt_bin/"baton", "serve", "--config", etc/"baton/baton.toml", "--log-file", var/"log/baton.log"]
    keep_alive successful_exit: false
    log_path var/"log/baton.log"
    error_log_path var/"log/baton.log"
    process_type :interactive
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/baton --version")
    system bin/"baton", "check-config", pkgshare/"configs/single-machine.toml"
  end
end
