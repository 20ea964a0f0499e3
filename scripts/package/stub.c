// Stands in for the program in tests of its packages: what they call of it, without a compiler's minutes.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    const char *command = argc > 1 ? argv[1] : "";
    if (!strcmp(command, "--version")) {
        printf("baton %s\n", VERSION);
    } else if (!strcmp(command, "completions") && argc > 2) {
        printf("# completions of %s\n", argv[2]);
    } else if (!strcmp(command, "man") && argc > 2) {
        char path[4096];
        snprintf(path, sizeof path, "%s/baton.1", argv[2]);
        FILE *page = fopen(path, "w");
        if (!page) return 1;
        fprintf(page, ".TH baton 1\n");
        fclose(page);
    } else if (!strcmp(command, "check-config") && argc > 2) {
        printf("%s is right\n", argv[2]);
    } else if (!strcmp(command, "serve")) {
        printf("serving %s\n", VERSION);
        fflush(stdout);
        pause();
    } else {
        return 2;
    }
    return 0;
}
